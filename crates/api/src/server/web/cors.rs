//! Which pages of browsers may use the API.

use std::{fmt, str::FromStr};

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use tonic::body::Body;

/// Response headers that a page may read.
const EXPOSED: HeaderValue =
    HeaderValue::from_static("grpc-status, grpc-message, grpc-status-details-bin, x-request-id");
/// Request headers that a page may send.
const ALLOWED: HeaderValue = HeaderValue::from_static(
    "authorization, content-type, connect-protocol-version, connect-timeout-ms, grpc-timeout, \
     x-grpc-web, x-user-agent, x-request-id",
);
/// How long a browser may remember the answer, in seconds: the most that browsers accept.
const MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

/// Origins of pages that may use the API.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CorsOrigins {
    /// No page.
    #[default]
    None,
    /// Every page.
    Any,
    /// Pages of these origins, such as `https://app.example.com`.
    Only(Vec<HeaderValue>),
}

/// Text that is not an origin.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an origin: write scheme://host or scheme://host:port without a path, or * alone"
)]
pub struct InvalidOrigin(String);

impl FromStr for CorsOrigins {
    type Err = InvalidOrigin;

    /// Parses `*` or origins with commas between them. The empty text means none.
    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        match text.trim() {
            "" => Ok(Self::None),
            "*" => Ok(Self::Any),
            list => list
                .split(',')
                .map(|origin| parse(origin.trim()))
                .collect::<Result<_, _>>()
                .map(Self::Only),
        }
    }
}

impl fmt::Display for CorsOrigins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origins = match self {
            Self::None => return Ok(()),
            Self::Any => return f.write_str("*"),
            Self::Only(origins) => origins.iter().filter_map(|origin| origin.to_str().ok()),
        };
        f.write_str(&origins.collect::<Vec<_>>().join(","))
    }
}

/// An origin as browsers send it.
fn parse(text: &str) -> Result<HeaderValue, InvalidOrigin> {
    let invalid = || InvalidOrigin(text.to_owned());
    let (scheme, host) = text.split_once("://").ok_or_else(invalid)?;
    let is_plain = |part: &str, more: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || more.contains(c))
    };
    if !is_plain(scheme, "+-.") || !is_plain(host, "-.:[]_") {
        return Err(invalid());
    }
    HeaderValue::from_str(text).map_err(|_| invalid())
}

/// Adds the headers that let a page use a response.
#[derive(Debug)]
pub(crate) struct Cors(pub(crate) CorsOrigins);

impl Cors {
    /// The headers of every response to a request. Without them the browser keeps the response
    /// from the page.
    pub(crate) fn headers(&self, request: &HeaderMap) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let origin = request.get(header::ORIGIN);
        let allowed = match (&self.0, origin) {
            (CorsOrigins::None, _) => return headers,
            (CorsOrigins::Any, origin) => origin.map(|_| HeaderValue::from_static("*")),
            (CorsOrigins::Only(origins), origin) => {
                headers.insert(header::VARY, HeaderValue::from_static("origin"));
                origin.filter(|origin| origins.contains(origin)).cloned()
            }
        };
        if let Some(allowed) = allowed {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
            headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
        headers
    }

    /// The answer to a browser that asks whether a page may send a request.
    pub(crate) fn preflight(&self, request: &Request<Body>) -> Option<Response<Body>> {
        let headers = request.headers();
        if request.method() != Method::OPTIONS
            || !headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
        {
            return None;
        }
        let is_allowed = self.headers(headers).contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN);
        let mut response = Response::new(Body::empty());
        if !is_allowed {
            *response.status_mut() = StatusCode::FORBIDDEN;
            *response.body_mut() = Body::new(
                "the origin is not allowed; an operator can add it to api.cors_origins\n"
                    .to_owned(),
            );
            return Some(response);
        }
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("POST"));
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, ALLOWED);
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        Some(response)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preflight(origins: &str, origin: &'static str) -> (u16, Option<HeaderValue>) {
        let cors = Cors(origins.parse().unwrap());
        let request = Request::options("/")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .body(Body::empty())
            .unwrap();
        let allowed = cors.headers(request.headers()).remove("access-control-allow-origin");
        (cors.preflight(&request).unwrap().status().as_u16(), allowed)
    }

    #[test]
    fn only_configured_origins_are_allowed() {
        let page = "https://app.example";
        let allowed = |origin| (204, Some(HeaderValue::from_static(origin)));
        assert_eq!(preflight("", page), (403, None));
        assert_eq!(preflight("*", page), allowed("*"));
        assert_eq!(preflight("http://localhost:8000, https://app.example", page), allowed(page));
        for other in
            ["https://app.example.evil", "http://app.example", "https://app.example:8443", "null"]
        {
            assert_eq!(preflight("https://app.example", other), (403, None), "{other}");
        }
    }

    #[test]
    fn text_that_is_not_an_origin_is_refused() {
        for bad in [
            "app.example",
            "https://",
            "https://a/",
            "https://A.example",
            "*,https://a",
            "https://a b",
            "null",
        ] {
            let parsed: Result<CorsOrigins, _> = bad.parse();
            assert!(parsed.is_err(), "{bad}: {parsed:?}");
        }
    }
}
