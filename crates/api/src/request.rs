//! What surrounds every call: its id, its span, its deadline, its metrics, and one way of saying
//! that a request could not be read.

use std::{
    collections::HashSet,
    convert::Infallible,
    sync::Arc,
    task::{Context as Poller, Poll},
    time::Duration,
};

use codelia_telemetry::metrics;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response};
use prost::Message;
use prost_types::FileDescriptorSet;
use tokio::time::Instant;
use tonic::{Code, Status, body::Body};
use tower::{Layer, Service};
use tracing::Instrument;
use uuid::Uuid;

use crate::status::ApiError;

const REQUEST_ID: &str = "x-request-id";
const MAX_REQUEST_ID: usize = 128;
/// The transport has a timer for the same header and calls its end `CANCELLED`; ours must be first.
const AHEAD_OF_TRANSPORT: Duration = Duration::from_millis(3);

/// When the caller's time is over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(pub(crate) Option<Instant>);

impl Deadline {
    /// Waits for it; for ever if there is none.
    pub(crate) async fn passed(self) {
        match self.0 {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// That of a call, as this layer left it there.
    pub(crate) fn of_call<T>(request: &tonic::Request<T>) -> Self {
        request.extensions().get().copied().unwrap_or(Self(None))
    }

    fn of(headers: &HeaderMap) -> Self {
        let after = headers.get("grpc-timeout").and_then(|value| parse_timeout(value.to_str().ok()?));
        Self(after.map(|after| Instant::now() + after.saturating_sub(AHEAD_OF_TRANSPORT)))
    }
}

/// Reads a `grpc-timeout`: at most eight digits and a unit.
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

fn code_of(headers: &HeaderMap) -> Code {
    headers.get("grpc-status").map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes()))
}

/// The transport calls a request it cannot decode `INTERNAL` and one that is too large
/// `OUT_OF_RANGE`. Neither carries details, as every refusal of ours does.
fn is_unreadable(headers: &HeaderMap) -> bool {
    matches!(code_of(headers), Code::Internal | Code::OutOfRange)
        && !headers.contains_key("grpc-status-details-bin")
}

/// The same for a request within a stream.
pub(crate) fn unreadable(status: &Status) -> Option<ApiError> {
    matches!(status.code(), Code::Internal | Code::OutOfRange).then(request_unreadable)
}

fn request_unreadable() -> ApiError {
    ApiError::invalid("request", "is too large or malformed")
}

/// Names of methods, so that an invented one cannot become a metric's label.
#[derive(Debug)]
struct Methods(HashSet<String>);

impl Methods {
    fn of(descriptors: &FileDescriptorSet) -> Self {
        let services = descriptors
            .file
            .iter()
            .flat_map(|file| file.service.iter().map(move |service| (file.package(), service)));
        let paths = services.flat_map(|(package, service)| {
            service
                .method
                .iter()
                .map(move |method| format!("/{package}.{}/{}", service.name(), method.name()))
        });
        Self(paths.collect())
    }

    fn label<'a>(&self, path: &'a str) -> &'a str {
        if self.0.contains(path) { path.trim_start_matches('/') } else { "other" }
    }
}

/// Surrounds every call, as a layer.
#[derive(Debug, Clone)]
pub(crate) struct Calls {
    methods: Arc<Methods>,
}

impl Calls {
    /// For the methods that these descriptors declare.
    pub(crate) fn new(descriptors: &[u8]) -> Result<Self, prost::DecodeError> {
        let methods = Methods::of(&FileDescriptorSet::decode(descriptors)?);
        Ok(Self { methods: Arc::new(methods) })
    }
}

impl<S> Layer<S> for Calls {
    type Service = Surrounded<S>;

    fn layer(&self, inner: S) -> Surrounded<S> {
        Surrounded { calls: self.clone(), inner }
    }
}

/// A service whose calls are surrounded.
#[derive(Debug, Clone)]
pub(crate) struct Surrounded<S> {
    calls: Calls,
    inner: S,
}

impl<S> Service<Request<Body>> for Surrounded<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, poller: &mut Poller<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(poller)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let started = Instant::now();
        let (id, deadline) = (request_id(request.headers()), Deadline::of(request.headers()));
        let path = request.uri().path().to_owned();
        let span = tracing::info_span!(
            "request",
            method = path,
            request_id = id.to_str().unwrap_or_default(),
            tenant = tracing::field::Empty,
        );
        request.extensions_mut().insert(deadline);
        let answer = span.in_scope(|| self.inner.call(request));
        let methods = self.calls.methods.clone();
        let work = async move {
            let mut response = answered_in_time(answer, deadline).await;
            metrics().request(
                methods.label(&path),
                code_word(code_of(response.headers())),
                started.elapsed(),
            );
            response.headers_mut().insert(REQUEST_ID, id);
            Ok(response)
        };
        Box::pin(work.instrument(span))
    }
}

async fn answered_in_time<F>(answer: F, deadline: Deadline) -> Response<Body>
where
    F: Future<Output = Result<Response<Body>, Infallible>>,
{
    tokio::select! {
        biased;
        answer = answer => {
            let Ok(response) = answer;
            if is_unreadable(response.headers()) { Status::from(request_unreadable()).into_http() } else { response }
        }
        () = deadline.passed() => Status::from(ApiError::DeadlineExceeded).into_http(),
    }
}

fn code_word(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_in_every_unit() {
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
    fn only_known_methods_become_labels() {
        let calls = Calls::new(codelia_proto::PUBLIC_DESCRIPTORS).unwrap();
        assert_eq!(calls.methods.label("/codelia.v1.RunService/StartRun"), "codelia.v1.RunService/StartRun");
        assert_eq!(calls.methods.label("/codelia.v1.RunService/Invented"), "other");
    }

    #[test]
    fn a_request_id_is_kept_if_it_is_fit_for_a_log() {
        let with = |id: &str| HeaderMap::from_iter([(REQUEST_ID.parse().unwrap(), id.parse().unwrap())]);
        assert_eq!(request_id(&with("abc-1")), "abc-1");
        assert_ne!(request_id(&with("a b")), "a b");
        assert_eq!(request_id(&with(&"a".repeat(129))).len(), 36);
    }

    #[test]
    fn a_refusal_of_ours_is_never_taken_for_an_unreadable_request() {
        let ours: Response<Body> = Status::from(ApiError::internal("x")).into_http();
        let transport: Response<Body> = Status::out_of_range("too large").into_http();
        assert!(!is_unreadable(ours.headers()));
        assert!(is_unreadable(transport.headers()));
    }

    #[tokio::test]
    async fn a_call_that_never_answers_ends_with_its_deadline() {
        let deadline = Deadline(Some(Instant::now()));
        let response = answered_in_time(std::future::pending(), deadline).await;
        assert_eq!(code_of(response.headers()), Code::DeadlineExceeded);
    }
}
