//! The layer around every call: request id, span, deadline, metrics, access log, and one
//! error for requests that the transport cannot decode.

use std::{
    convert::Infallible,
    error::Error as _,
    sync::Arc,
    task::{Context as Poller, Poll},
    time::Duration,
};

use codelia_server::HttpService;
use codelia_telemetry::{metrics, trace};
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::time::Instant;
use tonic::{Code, Status, body::Body};
use tower::Service;
use tracing::Instrument;
use uuid::Uuid;

use super::{
    access_log::{AccessLine, CallTenant},
    body_limit::MessageError,
    grpc_code::{code_name, grpc_code},
    methods::Methods,
};
use crate::error::ApiError;

const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID: usize = 128;
/// The transport ends a call at the same deadline with `CANCELLED`; ours must fire before it.
const DEADLINE_MARGIN: Duration = Duration::from_millis(3);

/// The deadline of a call, if the caller set one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(pub(crate) Option<Instant>);

impl Deadline {
    /// Waits until the deadline; indefinitely if there is none.
    pub(crate) async fn passed(self) {
        match self.0 {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// The deadline that [`RequestService`] attached to a request.
    pub(crate) fn from_request<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get().copied().unwrap_or(Self(None))
    }

    fn from_headers(headers: &HeaderMap) -> Self {
        let after =
            headers.get("grpc-timeout").and_then(|value| parse_timeout(value.to_str().ok()?));
        Self(after.map(|after| Instant::now() + after.saturating_sub(DEADLINE_MARGIN)))
    }
}

/// Parses a `grpc-timeout`: at most eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// The caller's id for this request, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|id| {
        (1..=MAX_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
    });
    given.cloned().unwrap_or_else(|| {
        // A UUID is always a valid header.
        HeaderValue::from_str(&Uuid::now_v7().to_string()).unwrap_or(HeaderValue::from_static("-"))
    })
}

/// Whether the transport could not decode the request. It answers `INTERNAL` to a malformed request
/// and `OUT_OF_RANGE` to one that is too large, without the details that our own errors carry.
fn is_undecodable(headers: &HeaderMap) -> bool {
    matches!(grpc_code(headers), Code::Internal | Code::OutOfRange)
        && !headers.contains_key("grpc-status-details-bin")
}

/// The error for a message of a stream that was refused or that the transport could not decode.
pub(crate) fn undecodable(status: &Status) -> Option<ApiError> {
    if let Some(MessageError(error)) = status.source().and_then(|source| source.downcast_ref()) {
        return Some(error.clone());
    }
    matches!(status.code(), Code::Internal | Code::OutOfRange).then(undecodable_request)
}

fn undecodable_request() -> ApiError {
    ApiError::invalid("request", "too large or malformed")
}

/// Gives every call an id, a span, a deadline, metrics and a line in the access log.
#[derive(Debug, Clone)]
pub(crate) struct RequestService<S> {
    /// The names of the methods are labels of metrics.
    pub(crate) methods: Arc<Methods>,
    pub(crate) access_log: bool,
    pub(crate) inner: S,
}

impl<S: HttpService> Service<Request<Body>> for RequestService<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, poller: &mut Poller<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(poller)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let started = Instant::now();
        let id = request_id(request.headers());
        let deadline = Deadline::from_headers(request.headers());
        let path = request.uri().path().to_owned();
        let span = tracing::info_span!(
            "request",
            method = self.methods.label(&path),
            request_id = id.to_str().unwrap_or_default(),
            tenant = tracing::field::Empty,
        );
        let traceparent = request.headers().get(trace::TRACEPARENT);
        trace::continue_from_caller(&span, traceparent.map(HeaderValue::as_bytes));
        let tenant = CallTenant::default();
        request.extensions_mut().insert(deadline);
        request.extensions_mut().insert(tenant.clone());
        let response = span.in_scope(|| self.inner.call(request));
        let methods = self.methods.clone();
        let line = self.access_log.then(|| {
            let method = methods.label(&path).to_owned();
            AccessLine { method, tenant, request_id: id.clone(), started, code: None }
        });
        let work = async move {
            let mut response = respond_before(deadline, response).await;
            let code = code_name(grpc_code(response.headers()));
            metrics().request(methods.label(&path), code, started.elapsed());
            trace::end("code", code);
            response.headers_mut().insert(REQUEST_ID, id);
            Ok(match line {
                Some(line) => line.attach(response),
                None => response,
            })
        };
        Box::pin(work.instrument(span))
    }
}

/// The response, or an error if the deadline passes first.
async fn respond_before<F>(deadline: Deadline, response: F) -> Response<Body>
where
    F: Future<Output = Result<Response<Body>, Infallible>>,
{
    tokio::select! {
        biased;
        Ok(response) = response => {
            if is_undecodable(response.headers()) {
                Status::from(undecodable_request()).into_http()
            } else {
                response
            }
        }
        () = deadline.passed() => Status::from(ApiError::deadline_exceeded()).into_http(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_parse_in_every_unit() {
        for (text, expected) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("4m", Some(Duration::from_millis(4))),
            ("5u", Some(Duration::from_micros(5))),
            ("6n", Some(Duration::from_nanos(6))),
            ("", None),
            ("S", None),
            ("1", None),
            ("123456789S", None),
            ("-1S", None),
            ("1é", None),
        ] {
            assert_eq!(parse_timeout(text), expected, "{text}");
        }
    }

    #[test]
    fn printable_request_id_is_kept() {
        let with =
            |id: &str| HeaderMap::from_iter([(REQUEST_ID.parse().unwrap(), id.parse().unwrap())]);
        assert_eq!(request_id(&with("abc-1")), "abc-1");
        assert_ne!(request_id(&with("a b")), "a b");
        assert_eq!(request_id(&with(&"a".repeat(129))).len(), 36);
    }

    #[test]
    fn own_errors_are_not_taken_for_undecodable_requests() {
        let ours: Response<Body> = Status::from(ApiError::internal("x")).into_http();
        let transport: Response<Body> = Status::out_of_range("too large").into_http();
        assert!(!is_undecodable(ours.headers()));
        assert!(is_undecodable(transport.headers()));
    }

    #[tokio::test]
    async fn call_without_response_ends_at_deadline() {
        let deadline = Deadline(Some(Instant::now()));
        let response = respond_before(deadline, std::future::pending()).await;
        assert_eq!(grpc_code(response.headers()), Code::DeadlineExceeded);
    }
}
