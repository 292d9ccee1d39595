//! Which protocol a request speaks, by its HTTP method, path and content type.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method as HttpMethod, Request, Response, Version, header};
use tonic::body::Body;

use super::{
    answer,
    schema::{Method, Schema},
};
use crate::{error::ApiError, server::body_limit::Framing};

/// Protocols whose messages are JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// The request is one message. So is the response, unless it is a stream: then lines.
    Json,
    /// Each line of the request is a message.
    JsonLines,
    /// Connect's streams: each message has a prefix.
    ConnectStream,
}

impl Protocol {
    pub(crate) fn framing(self) -> Framing {
        match self {
            Self::Json => Framing::Whole,
            Self::JsonLines => Framing::Lines,
            Self::ConnectStream => Framing::Prefixed,
        }
    }
}

/// What happens to a request.
pub(crate) enum Route {
    Grpc,
    GrpcWeb { is_text: bool },
    Json { protocol: Protocol, method: Arc<Method> },
    Answer(Response<Body>),
}

pub(crate) fn route(schema: &Schema, request: &Request<Body>) -> Route {
    let media_type = media_type(request.headers());
    let path = request.uri().path();
    let method = schema.method(path);
    if request.method() != HttpMethod::POST {
        let is_read = [HttpMethod::GET, HttpMethod::HEAD].contains(request.method());
        return Route::Answer(match method {
            Some(_) => answer::wrong_method(path),
            None if path == "/" && is_read => answer::about(),
            None => answer::not_found(path),
        });
    }
    let protocol = match media_type.as_str() {
        "application/grpc-web" | "application/grpc-web+proto" => {
            return Route::GrpcWeb { is_text: false };
        }
        "application/grpc-web-text" | "application/grpc-web-text+proto" => {
            return Route::GrpcWeb { is_text: true };
        }
        "application/json" => Protocol::Json,
        "application/x-ndjson" => Protocol::JsonLines,
        "application/connect+json" => Protocol::ConnectStream,
        grpc if grpc == "application/grpc" || grpc.starts_with("application/grpc+") => {
            return match request.version() {
                Version::HTTP_2 => Route::Grpc,
                _ => Route::Answer(answer::grpc_needs_http2()),
            };
        }
        _ if method.is_some() => return Route::Answer(answer::wrong_content_type()),
        _ => return Route::Answer(answer::not_found(path)),
    };
    match method {
        Some(method) => Route::Json { protocol, method: method.clone() },
        None => Route::Answer(answer::unknown_method(path)),
    }
}

/// The content type without its parameters, in lower case. Empty if there is none.
fn media_type(headers: &HeaderMap) -> String {
    let value =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Checks the headers of a JSON call and returns its deadline as a `grpc-timeout`.
pub(crate) fn check_headers(headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
    for name in ["content-encoding", "connect-content-encoding"] {
        if headers.get(name).is_some_and(|encoding| encoding != "identity") {
            return Err(ApiError::invalid(name, "compression is not supported; send identity"));
        }
    }
    if headers.get("connect-protocol-version").is_some_and(|version| version != "1") {
        return Err(ApiError::invalid("connect-protocol-version", "must be 1"));
    }
    let Some(timeout) = headers.get("connect-timeout-ms") else { return Ok(None) };
    let milliseconds = timeout.to_str().ok().filter(|text| {
        (1..=10).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
    });
    let invalid =
        || ApiError::invalid("connect-timeout-ms", "must be a number of at most 10 digits");
    let milliseconds: u64 = milliseconds.and_then(|text| text.parse().ok()).ok_or_else(invalid)?;
    // gRPC allows eight digits.
    let timeout = if milliseconds < 100_000_000 {
        format!("{milliseconds}m")
    } else {
        format!("{}S", milliseconds / 1000)
    };
    HeaderValue::try_from(timeout).map(Some).map_err(|_| invalid())
}

#[cfg(test)]
mod tests {
    use super::*;

    const START_RUN: &str = "/codelia.v1.RunService/StartRun";

    fn routed(http_method: &str, path: &str, content_type: &str, version: Version) -> String {
        let request = Request::builder()
            .method(http_method)
            .uri(path)
            .version(version)
            .header("content-type", content_type)
            .body(Body::empty())
            .unwrap();
        match route(&Schema::load().unwrap(), &request) {
            Route::Grpc => "grpc".into(),
            Route::GrpcWeb { is_text } => format!("grpc-web {is_text}"),
            Route::Json { protocol, .. } => format!("{protocol:?}"),
            Route::Answer(answer) => answer.status().as_u16().to_string(),
        }
    }

    #[test]
    fn content_type_selects_the_protocol() {
        for (content_type, expected) in [
            ("application/grpc", "grpc"),
            ("application/grpc+proto", "grpc"),
            ("application/grpc-web", "grpc-web false"),
            ("application/grpc-web-text+proto", "grpc-web true"),
            ("Application/JSON; charset=utf-8", "Json"),
            ("application/x-ndjson", "JsonLines"),
            ("application/connect+json", "ConnectStream"),
            ("text/plain", "415"),
            ("", "415"),
        ] {
            assert_eq!(
                routed("POST", START_RUN, content_type, Version::HTTP_2),
                expected,
                "{content_type}"
            );
        }
        assert_eq!(routed("POST", START_RUN, "application/grpc", Version::HTTP_11), "505");
        assert_eq!(
            routed("POST", "/codelia.v1.RunService/Nosuch", "application/json", Version::HTTP_11),
            "404"
        );
        assert_eq!(routed("POST", "/nosuch", "text/plain", Version::HTTP_11), "404");
    }

    #[test]
    fn only_post_calls_methods() {
        for (http_method, path, expected) in [
            ("GET", "/", "200"),
            ("HEAD", "/", "200"),
            ("DELETE", "/", "404"),
            ("GET", START_RUN, "405"),
            ("GET", "/favicon.ico", "404"),
        ] {
            assert_eq!(
                routed(http_method, path, "", Version::HTTP_11),
                expected,
                "{http_method} {path}"
            );
        }
    }

    #[test]
    fn deadline_of_connect_becomes_one_of_grpc() {
        let check = |name: &'static str, value: &str| {
            check_headers(&HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]))
        };
        assert_eq!(
            check("connect-timeout-ms", "1500"),
            Ok(Some(HeaderValue::from_static("1500m")))
        );
        assert_eq!(
            check("connect-timeout-ms", "9999999999"),
            Ok(Some(HeaderValue::from_static("9999999S")))
        );
        assert_eq!(check("connect-protocol-version", "1"), Ok(None));
        for (name, value) in [
            ("connect-timeout-ms", "-1"),
            ("connect-timeout-ms", "12345678901"),
            ("connect-protocol-version", "2"),
            ("content-encoding", "gzip"),
            ("connect-content-encoding", "gzip"),
        ] {
            assert!(check(name, value).is_err(), "{name}: {value}");
        }
    }
}
