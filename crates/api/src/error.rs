//! [`ApiError`]: why a call fails. It becomes a [`Status`] here and nowhere else; the code, the
//! stable word and the remedy belong to its [`Reason`]. Texts for one call are next to its handler.

use std::{
    collections::{BTreeMap, HashMap},
    error::Error,
    fmt,
    time::Duration,
};

use codelia_policy::{LimitError, PlanError, PolicyError};
use codelia_proto::ERROR_DOMAIN;
use codelia_store::ObjectProblem;
use codelia_telemetry::{TenantBusy, metrics};
use codelia_types::Reason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// The delay in `RetryInfo` when no better one is known.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why a call fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    reason: Reason,
    /// For the caller, without the field of a [`Violation::Field`].
    message: String,
    /// The field, quota, rule and so on, for programs.
    metadata: BTreeMap<String, String>,
    violation: Option<Box<Violation>>,
    /// When a retry may succeed.
    retry_after: Option<Duration>,
    /// For the log. Never sent.
    internal: Option<String>,
}

/// What the standard details of gRPC name.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Violation {
    /// `BadRequest`: the field of the metadata.
    Field,
    /// `QuotaFailure`: the quota of the metadata.
    Quota,
    /// `ResourceInfo`: an object that is missing or has ended.
    Resource { kind: &'static str, name: String },
}

impl ApiError {
    /// An error with a text for the caller.
    pub(crate) fn new(reason: Reason, message: impl Into<String>) -> Self {
        let may_succeed_soon = matches!(
            reason,
            Reason::QueryTimeout
                | Reason::SessionBusy
                | Reason::ShuttingDown
                | Reason::TooManyCalls
                | Reason::TooManyFileCalls
                | Reason::Unavailable
        );
        Self {
            reason,
            message: message.into(),
            metadata: BTreeMap::new(),
            violation: None,
            retry_after: may_succeed_soon.then_some(RETRY_DELAY),
            internal: None,
        }
    }

    /// Adds metadata for programs.
    pub(crate) fn with(mut self, key: &str, value: impl ToString) -> Self {
        self.metadata.insert(key.to_owned(), value.to_string());
        self
    }

    /// Adds the quota or limit of the tenant that is reached.
    pub(crate) fn of_quota(mut self, quota: &str) -> Self {
        self.violation = Some(Box::new(Violation::Quota));
        self.with("quota", quota)
    }

    /// Adds the object that is missing or has ended, as the caller named it.
    pub(crate) fn of_resource(mut self, kind: &'static str, name: impl ToString) -> Self {
        self.violation = Some(Box::new(Violation::Resource { kind, name: name.to_string() }));
        self
    }

    /// Adds when a retry may succeed.
    pub(crate) fn retry_after(mut self, delay: Duration) -> Self {
        self.retry_after = Some(delay);
        self
    }

    /// Adds the detail for the log.
    pub(crate) fn internal_detail(mut self, detail: impl ToString) -> Self {
        self.internal = Some(detail.to_string());
        self
    }

    /// An invalid field; `field` is its path in the request.
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        let violation = Some(Box::new(Violation::Field));
        Self { violation, ..Self::new(Reason::InvalidField, message) }.with("field", field.into())
    }

    /// A missing resource; `kind` is `session`, `run` and so on, `name` is how the caller named it.
    /// The response is the same if it belongs to another tenant.
    pub(crate) fn not_found(kind: &'static str, name: impl fmt::Display) -> Self {
        let name = name.to_string();
        Self::new(Reason::NotFound, format!("{kind} {name:?} not found")).of_resource(kind, name)
    }

    /// The request has no valid key.
    pub(crate) fn unauthenticated() -> Self {
        Self::new(
            Reason::KeyInvalid,
            "API key missing or invalid: send `authorization: Bearer <key>`",
        )
    }

    /// The tenant has reached a quota.
    pub(crate) fn quota_exceeded(quota: &str) -> Self {
        let message =
            format!("quota `{quota}` reached; reduce usage or ask an operator to raise it");
        Self::new(Reason::QuotaExceeded, message).of_quota(quota)
    }

    /// The tenant is being deleted.
    pub(crate) fn tenant_deleted() -> Self {
        Self::new(Reason::TenantDeleted, "the tenant is being deleted; that cannot be undone")
    }

    /// The idempotency key belongs to a different request.
    pub(crate) fn idempotency_key_reused() -> Self {
        let message = "idempotency_key: already used for a different request; use a new key";
        Self::new(Reason::IdempotencyKeyReused, message).with("field", "idempotency_key")
    }

    /// The caller's deadline passed.
    pub(crate) fn deadline_exceeded() -> Self {
        Self::new(Reason::DeadlineExceeded, "deadline exceeded; retry with a longer one")
    }

    /// This server is stopping; another may answer.
    pub(crate) fn shutting_down() -> Self {
        Self::new(Reason::ShuttingDown, "the server is shutting down; retry")
    }

    /// A dependency that does not answer, with the detail for the log.
    pub(crate) fn unavailable(detail: impl fmt::Display) -> Self {
        Self::new(Reason::Unavailable, "temporarily unavailable; retry").internal_detail(detail)
    }

    /// A bug, with the detail for the log.
    pub(crate) fn internal(detail: impl fmt::Display) -> Self {
        let message = "internal error; report the x-request-id to the operator";
        Self::new(Reason::Internal, message).internal_detail(detail)
    }

    /// The error that a worker reports for a file call; `None` if the status is not from a worker
    /// but from the transport.
    pub(crate) fn from_worker(status: &Status) -> Option<Self> {
        let info = status.get_details_error_info().filter(|info| info.domain == ERROR_DOMAIN)?;
        let mut error = Self::new(Reason::parse(&info.reason), status.message());
        error.metadata.extend(info.metadata);
        if error.reason == Reason::InvalidField
            && let Some(field) = error.metadata.get("field")
        {
            error.violation = Some(Box::new(Violation::Field));
            let message =
                error.message.strip_prefix(field).and_then(|text| text.strip_prefix(": "));
            if let Some(message) = message.map(str::to_owned) {
                error.message = message;
            }
        }
        if error.metadata.contains_key("quota") {
            error.violation = Some(Box::new(Violation::Quota));
        }
        Some(error)
    }

    /// Prefixes the path of the invalid field, if there is one, with `parent`.
    pub(crate) fn within(mut self, parent: &str) -> Self {
        if self.violation.as_deref() == Some(&Violation::Field)
            && let Some(field) = self.metadata.get_mut("field")
        {
            *field = format!("{parent}.{field}");
        }
        self
    }

    /// The stable reason.
    pub(crate) fn reason(&self) -> Reason {
        self.reason
    }

    /// A value of the metadata.
    pub(crate) fn named(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// The path of the invalid field, if that is what is wrong.
    pub(crate) fn invalid_field(&self) -> Option<&str> {
        self.named("field").filter(|_| self.reason == Reason::InvalidField)
    }

    /// Whether the call was refused and changed nothing. Another error may come after a change was
    /// stored.
    pub(crate) fn is_refusal(&self) -> bool {
        !matches!(
            self.reason,
            Reason::Unavailable
                | Reason::Internal
                | Reason::QueryTimeout
                | Reason::DeadlineExceeded
                | Reason::ShuttingDown
        )
    }

    /// The text for the caller, without internal detail.
    pub(crate) fn text(&self) -> String {
        match (self.violation.as_deref(), self.named("field")) {
            (Some(Violation::Field), Some(field)) => format!("{field}: {}", self.message),
            _ => self.message.clone(),
        }
    }

    fn log(&self) {
        let reason = self.reason;
        match (&self.internal, reason) {
            (Some(detail), Reason::Internal | Reason::OutputDataLost) => {
                tracing::error!(detail, %reason, "request failed");
            }
            (Some(detail), _) => tracing::warn!(detail, %reason, "request failed"),
            (None, _) => tracing::debug!(%reason, "request refused"),
        }
    }
}

/// For the log: the detail if there is one, else the text.
impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.internal {
            Some(detail) => f.write_str(detail),
            None => f.write_str(&self.text()),
        }
    }
}

/// Logs the error, once, and counts it.
impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        error.log();
        metrics().refused(error.reason.as_str());
        let text = error.text();
        let mut details = ErrorDetails::new();
        if error.retry_after.is_some() {
            details.set_retry_info(error.retry_after);
        }
        match error.violation.as_deref() {
            Some(Violation::Field) => {
                let field = error.named("field").unwrap_or_default();
                details.add_bad_request_violation(field, &error.message);
            }
            Some(Violation::Quota) => {
                let quota = error.named("quota").unwrap_or_default();
                metrics().quota_refused(quota);
                details
                    .add_quota_failure_violation("tenants/-", format!("quota `{quota}` reached"));
            }
            // The caller's own words: they do not reveal whether another tenant has such a
            // resource.
            Some(Violation::Resource { kind, name }) => {
                details.set_resource_info(format!("{ERROR_DOMAIN}/{kind}"), name, "", &text);
            }
            None => {}
        }
        let reason = error.reason.as_str();
        let metadata: HashMap<_, _> = error.metadata.into_iter().collect();
        details.set_error_info(reason, ERROR_DOMAIN, metadata);
        Status::with_error_details(Code::from_i32(error.reason.code() as i32), text, details)
    }
}

impl From<codelia_store::Error> for ApiError {
    fn from(error: codelia_store::Error) -> Self {
        use codelia_store::Error as E;
        let detail = with_sources(&error);
        match error {
            // A row that is missing was deleted concurrently; a retry sees the new state.
            E::Unavailable(_) | E::PoolExhausted | E::LockTimeout(_) | E::RowMissing { .. } => {
                Self::unavailable(detail)
            }
            E::StatementTimeout(_) => Self::new(
                Reason::QueryTimeout,
                "the database took too long; retry, or ask for less: a smaller page, one session, a filter",
            )
            .internal_detail(detail),
            E::TooManyApprovals { .. } => Self::new(
                Reason::TooManyApprovals,
                format!("{error}; decide about some, or revoke what is not needed any more"),
            ),
            E::Object { name, problem } => match problem {
                ObjectProblem::Missing | ObjectProblem::Shortened { .. } => {
                    let message = format!(
                        "output of the run is lost: object {name:?}: {problem}; `GetRun` has the result"
                    );
                    let error = Self::new(Reason::OutputDataLost, message).internal_detail(detail);
                    error.with("object", name)
                }
                ObjectProblem::Timeout | ObjectProblem::Failed(_) => Self::unavailable(detail),
                ObjectProblem::NotConfigured => Self::internal(detail),
            },
            E::InvalidUrl
            | E::NoUrl
            | E::TooFewConnections { .. }
            | E::MigrateThroughPooler
            | E::Statement(_)
            | E::UnknownValue { .. }
            | E::Migrate(_)
            | E::NotMigrated
            | E::AlreadyExists { .. }
            | E::OutputStore { .. }
            | E::Fenced => Self::internal(detail),
        }
    }
}

/// The error and its causes in one line.
fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

impl From<LimitError> for ApiError {
    fn from(error: LimitError) -> Self {
        Self::invalid(error.field(), error.to_string())
    }
}

impl From<PolicyError> for ApiError {
    fn from(error: PolicyError) -> Self {
        match error.field.as_str() {
            "" => Self::invalid("policy", error.message),
            field => Self::invalid(format!("policy.{field}"), error.message),
        }
    }
}

impl From<PlanError> for ApiError {
    fn from(error: PlanError) -> Self {
        let remedy = error.remedy.unwrap_or("choose another mode");
        Self::invalid(error.field, format!("cannot be enforced in mode {}; {remedy}", error.mode))
    }
}

/// Too many checks of large policies of the tenant wait already.
impl From<TenantBusy> for ApiError {
    fn from(busy: TenantBusy) -> Self {
        let message = format!(
            "too many policies at once: {} calls with a large policy are waiting already; retry, or use \
             smaller policies",
            busy.max_waiting
        );
        Self::new(Reason::RateLimited, message).of_quota("policy_checks").retry_after(RETRY_DELAY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_worker(reason: Reason, message: &str, metadata: &[(&str, &str)]) -> Option<ApiError> {
        let metadata: HashMap<_, _> =
            metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let details = ErrorDetails::with_error_info(reason.as_str(), ERROR_DOMAIN, metadata);
        ApiError::from_worker(&Status::with_error_details(Code::Aborted, message, details))
    }

    #[test]
    fn every_reason_becomes_a_status_with_its_code_and_domain() {
        for &reason in Reason::ALL {
            let status = Status::from(ApiError::new(reason, "text"));
            let info = status.get_details_error_info().unwrap();
            assert_eq!(format!("{:?}", status.code()), format!("{:?}", reason.code()), "{reason}");
            assert_eq!(
                (info.domain.as_str(), info.reason.as_str()),
                ("codelia.dev", reason.as_str())
            );
            assert_eq!(status.message(), "text");
        }
    }

    #[test]
    fn internal_detail_never_reaches_caller() {
        for error in [ApiError::unavailable("secret"), ApiError::internal("secret")] {
            assert_eq!(error.to_string(), "secret");
            let status = Status::from(error);
            assert!(!status.message().contains("secret"));
            assert!(!String::from_utf8_lossy(status.details()).contains("secret"));
        }
    }

    #[test]
    fn invalid_field_is_in_both_details() {
        let status = Status::from(ApiError::invalid("argv", "must not be empty").within("command"));
        assert_eq!(status.message(), "command.argv: must not be empty");
        let bad = status.get_details_bad_request().unwrap();
        assert_eq!(bad.field_violations[0].field, "command.argv");
        assert_eq!(bad.field_violations[0].description, "must not be empty");
        assert_eq!(status.get_details_error_info().unwrap().metadata["field"], "command.argv");
    }

    #[test]
    fn only_invalid_fields_get_a_parent() {
        let error = ApiError::idempotency_key_reused();
        assert_eq!(error.clone().within("start"), error);
    }

    #[test]
    fn quota_is_in_both_details() {
        let delay = Duration::from_millis(5);
        let error = ApiError::new(Reason::RateLimited, "slower").of_quota("requests_per_second");
        let status = Status::from(error.retry_after(delay));
        assert_eq!(
            status.get_details_error_info().unwrap().metadata["quota"],
            "requests_per_second"
        );
        assert_eq!(status.get_details_quota_failure().unwrap().violations.len(), 1);
        assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(delay));
    }

    #[test]
    fn missing_resource_is_named() {
        let status = Status::from(ApiError::not_found("session", "nosuch"));
        assert_eq!(status.message(), "session \"nosuch\" not found");
        let resource = status.get_details_resource_info().unwrap();
        assert_eq!(
            (resource.resource_type.as_str(), resource.resource_name.as_str()),
            ("codelia.dev/session", "nosuch")
        );
        assert!(resource.owner.is_empty());
    }

    #[test]
    fn worker_error_is_passed_on() {
        let absent =
            from_worker(Reason::FileNotFound, "path: no such file", &[("field", "path")]).unwrap();
        let status = Status::from(absent);
        assert_eq!((status.code(), status.message()), (Code::NotFound, "path: no such file"));
        assert_eq!(status.get_details_error_info().unwrap().metadata["field"], "path");
        assert!(
            status.get_details_bad_request().is_none() && status.get_details_retry_info().is_none()
        );

        let invalid = from_worker(Reason::InvalidField, "path: not valid", &[("field", "path")]);
        assert_eq!(invalid, Some(ApiError::invalid("path", "not valid")));
        let busy = from_worker(Reason::TooManyFileCalls, "too many", &[]).unwrap();
        assert!(Status::from(busy).get_details_retry_info().is_some());
    }

    #[test]
    fn broken_connection_is_not_an_error_of_the_worker() {
        assert_eq!(ApiError::from_worker(&Status::unavailable("broken")), None);
        let foreign = ErrorDetails::with_error_info("NOT_FOUND", "elsewhere.dev", HashMap::new());
        assert_eq!(
            ApiError::from_worker(&Status::with_error_details(Code::NotFound, "no", foreign)),
            None
        );
    }
}
