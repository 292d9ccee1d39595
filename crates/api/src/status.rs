//! The one place where errors become gRPC statuses: a code, a stable reason, a text for callers.
//! Internal detail is logged here, once, and goes no further.

use std::{collections::HashMap, error::Error as _, time::Duration};

use codelia_policy::{IsolationLevel, LimitError, PlanError, PolicyError};
use codelia_telemetry::metrics;
use codelia_types::Mode;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::files::Refused;

const DOMAIN: &str = "codelia";
/// When a caller should try again if we cannot know better.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Why a call is not answered with a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ApiError {
    /// A field of the request cannot be accepted.
    Invalid { field: String, message: String },
    /// Not there, or not the caller's: the two look the same.
    NotFound,
    /// No live key was sent.
    Unauthenticated,
    /// The key lacks a scope.
    Denied { scope: &'static str },
    /// The tenant uses as much as it may.
    OverQuota { quota: &'static str },
    /// The tenant calls too often.
    RateLimited { retry_after: Duration },
    /// The idempotency key belongs to another request.
    KeyReused,
    /// Another open session has the alias.
    AliasInUse,
    /// The tenant's id is in use.
    TenantExists,
    /// The session takes no runs any more.
    SessionEnded,
    /// The files of the session are gone.
    SessionDataLost,
    /// The installation does not allow the mode.
    ModeNotAllowed { mode: Mode },
    /// The mode isolates less than the tenant must be.
    BelowFloor { mode: Mode, floor: IsolationLevel },
    /// No live worker has the mode.
    ModeUnavailable { mode: Mode },
    /// The policy advises against the command.
    CommandNotAllowed { rule: String, message: String },
    /// The session's worker refused a file call.
    File(Refused),
    /// The caller's time is over.
    DeadlineExceeded,
    /// This server stops; another may answer.
    ShuttingDown,
    /// Something we need does not answer.
    Unavailable { detail: String },
    /// A defect of ours.
    Internal { detail: String },
}

impl ApiError {
    /// A field cannot be accepted; `field` is its path in the request.
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Invalid { field: field.into(), message: message.into() }
    }

    /// A defect of ours, with what the log should say.
    pub(crate) fn internal(detail: impl std::fmt::Display) -> Self {
        Self::Internal { detail: detail.to_string() }
    }

    /// Puts `parent` before the path of the field at fault, if there is one.
    pub(crate) fn within(self, parent: &str) -> Self {
        match self {
            Self::Invalid { field, message } => Self::Invalid { field: format!("{parent}.{field}"), message },
            other => other,
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::Invalid { .. } => Code::InvalidArgument,
            Self::NotFound => Code::NotFound,
            Self::Unauthenticated => Code::Unauthenticated,
            Self::Denied { .. } => Code::PermissionDenied,
            Self::OverQuota { .. } | Self::RateLimited { .. } => Code::ResourceExhausted,
            Self::KeyReused | Self::AliasInUse | Self::TenantExists => Code::AlreadyExists,
            Self::SessionEnded
            | Self::SessionDataLost
            | Self::ModeNotAllowed { .. }
            | Self::BelowFloor { .. }
            | Self::ModeUnavailable { .. }
            | Self::CommandNotAllowed { .. } => Code::FailedPrecondition,
            Self::File(refused) => refused.code(),
            Self::DeadlineExceeded => Code::DeadlineExceeded,
            Self::ShuttingDown | Self::Unavailable { .. } => Code::Unavailable,
            Self::Internal { .. } => Code::Internal,
        }
    }

    /// The stable word for it.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Invalid { .. } => "INVALID_FIELD",
            Self::NotFound => "NOT_FOUND",
            Self::Unauthenticated => "KEY_INVALID",
            Self::Denied { .. } => "SCOPE_MISSING",
            Self::OverQuota { .. } => "QUOTA_EXCEEDED",
            Self::RateLimited { .. } => "RATE_LIMITED",
            Self::KeyReused => "IDEMPOTENCY_KEY_REUSED",
            Self::AliasInUse => "ALIAS_IN_USE",
            Self::TenantExists => "TENANT_EXISTS",
            Self::SessionEnded => "SESSION_ENDED",
            Self::SessionDataLost => "SESSION_DATA_LOST",
            Self::ModeNotAllowed { .. } => "MODE_NOT_ALLOWED",
            Self::BelowFloor { .. } => "ISOLATION_FLOOR",
            Self::ModeUnavailable { .. } => "MODE_UNAVAILABLE",
            Self::CommandNotAllowed { .. } => "COMMAND_NOT_ALLOWED",
            Self::File(refused) => refused.word(),
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::ShuttingDown => "SHUTTING_DOWN",
            Self::Unavailable { .. } => "UNAVAILABLE",
            Self::Internal { .. } => "INTERNAL",
        }
    }

    /// What the caller reads. Nothing internal.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Invalid { field, message } => format!("{field}: {message}"),
            Self::NotFound => "not found".into(),
            Self::Unauthenticated => "no valid key: send `authorization: Bearer <key>`".into(),
            Self::Denied { scope } => format!("the key lacks the scope `{scope}`"),
            Self::OverQuota { quota } => format!("the quota `{quota}` is used up"),
            Self::RateLimited { .. } => "too many requests".into(),
            Self::KeyReused => "the idempotency key was used for another request".into(),
            Self::AliasInUse => "an open session has this alias".into(),
            Self::TenantExists => "a tenant has this id".into(),
            Self::SessionEnded => "the session has ended".into(),
            Self::SessionDataLost => {
                "the session's files are gone, or with a worker that is; create a new one".into()
            }
            Self::ModeNotAllowed { mode } => format!("mode {mode} is not allowed here"),
            Self::BelowFloor { mode, floor } => format!(
                "mode {mode} gives {}, and this tenant's isolation is at least {floor}; an operator may decide \
                 otherwise (codelia tenants floor)",
                IsolationLevel::of(*mode)
            ),
            Self::ModeUnavailable { mode } => format!("no worker has mode {mode}"),
            Self::CommandNotAllowed { rule, message } => format!("policy.{rule}: {message}"),
            Self::File(refused) => refused.text(),
            Self::DeadlineExceeded => "the deadline is over".into(),
            Self::ShuttingDown => "this server is shutting down".into(),
            Self::Unavailable { .. } => "temporarily unavailable".into(),
            Self::Internal { .. } => "internal error".into(),
        }
    }

    fn log(&self) {
        match self {
            Self::Unavailable { detail } => tracing::warn!(detail, "unavailable"),
            Self::Internal { detail } => tracing::error!(detail, "internal error"),
            Self::Invalid { .. }
            | Self::NotFound
            | Self::Unauthenticated
            | Self::Denied { .. }
            | Self::OverQuota { .. }
            | Self::RateLimited { .. }
            | Self::KeyReused
            | Self::AliasInUse
            | Self::TenantExists
            | Self::SessionEnded
            | Self::SessionDataLost
            | Self::ModeNotAllowed { .. }
            | Self::BelowFloor { .. }
            | Self::ModeUnavailable { .. }
            | Self::CommandNotAllowed { .. }
            | Self::File(_)
            | Self::DeadlineExceeded
            | Self::ShuttingDown => tracing::debug!(reason = self.reason(), "refused"),
        }
    }

    /// Adds what is specific to the error, and returns the metadata that names the field or quota.
    fn describe(&self, details: &mut ErrorDetails) -> HashMap<String, String> {
        let named = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        match self {
            Self::Invalid { field, message } => {
                details.add_bad_request_violation(field, message);
                named("field", field)
            }
            Self::OverQuota { quota } => over_quota(details, quota),
            Self::RateLimited { retry_after } => {
                details.set_retry_info(Some(*retry_after));
                over_quota(details, "requests_per_second")
            }
            Self::Denied { scope } => named("scope", scope),
            Self::KeyReused => named("field", "idempotency_key"),
            Self::AliasInUse => named("field", "alias"),
            Self::TenantExists => named("field", "tenant_id"),
            Self::ModeNotAllowed { mode }
            | Self::BelowFloor { mode, .. }
            | Self::ModeUnavailable { mode } => {
                let mut metadata = named("field", "mode");
                metadata.insert("mode".into(), mode.to_string());
                metadata
            }
            Self::CommandNotAllowed { rule, .. } => {
                let mut metadata = named("field", "command.argv");
                metadata.insert("rule".into(), format!("policy.{rule}"));
                metadata
            }
            Self::File(refused) => refused_file(details, refused),
            Self::ShuttingDown | Self::Unavailable { .. } => {
                details.set_retry_info(Some(RETRY_DELAY));
                HashMap::new()
            }
            Self::NotFound
            | Self::Unauthenticated
            | Self::SessionEnded
            | Self::SessionDataLost
            | Self::DeadlineExceeded
            | Self::Internal { .. } => HashMap::new(),
        }
    }
}

fn over_quota(details: &mut ErrorDetails, quota: &str) -> HashMap<String, String> {
    details.add_quota_failure_violation("tenants/-", format!("the quota `{quota}` is used up"));
    HashMap::from([("quota".to_owned(), quota.to_owned())])
}

fn refused_file(details: &mut ErrorDetails, refused: &Refused) -> HashMap<String, String> {
    if refused.may_be_retried() {
        details.set_retry_info(Some(RETRY_DELAY));
    }
    let mut metadata = HashMap::from([("field".to_owned(), refused.field.clone())]);
    metadata.extend(refused.rule().map(|rule| ("rule".to_owned(), rule)));
    metadata
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        error.log();
        metrics().refused(error.reason());
        let mut details = ErrorDetails::new();
        let metadata = error.describe(&mut details);
        details.set_error_info(error.reason(), DOMAIN, metadata);
        Status::with_error_details(error.code(), error.text(), details)
    }
}

impl From<codelia_store::Error> for ApiError {
    fn from(error: codelia_store::Error) -> Self {
        use codelia_store::Error as E;
        let detail = match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        match error {
            // What vanished was deleted under us; the caller may ask again.
            E::Unavailable(_) | E::RowMissing { .. } => Self::Unavailable { detail },
            E::InvalidUrl
            | E::Statement(_)
            | E::UnknownValue { .. }
            | E::Migrate(_)
            | E::NotMigrated
            | E::AlreadyExists { .. }
            | E::Fenced => Self::Internal { detail },
        }
    }
}

impl From<LimitError> for ApiError {
    fn from(error: LimitError) -> Self {
        Self::invalid(error.field(), error.to_string())
    }
}

impl From<PolicyError> for ApiError {
    fn from(error: PolicyError) -> Self {
        Self::invalid(format!("policy.{}", error.field), error.message)
    }
}

impl From<PlanError> for ApiError {
    fn from(error: PlanError) -> Self {
        Self::invalid(error.field, format!("cannot be enforced in mode {}", error.mode))
    }
}

#[cfg(test)]
mod tests {
    use codelia_proto::internal::v1::FileRefusalReason;

    use super::*;

    fn every_error() -> Vec<(ApiError, Code)> {
        vec![
            (ApiError::invalid("command.argv", "is empty"), Code::InvalidArgument),
            (ApiError::NotFound, Code::NotFound),
            (ApiError::Unauthenticated, Code::Unauthenticated),
            (ApiError::Denied { scope: "run" }, Code::PermissionDenied),
            (ApiError::OverQuota { quota: "sessions" }, Code::ResourceExhausted),
            (ApiError::RateLimited { retry_after: Duration::from_millis(5) }, Code::ResourceExhausted),
            (ApiError::KeyReused, Code::AlreadyExists),
            (ApiError::AliasInUse, Code::AlreadyExists),
            (ApiError::TenantExists, Code::AlreadyExists),
            (ApiError::SessionEnded, Code::FailedPrecondition),
            (ApiError::SessionDataLost, Code::FailedPrecondition),
            (ApiError::ModeNotAllowed { mode: Mode::Logical }, Code::FailedPrecondition),
            (
                ApiError::BelowFloor { mode: Mode::Logical, floor: IsolationLevel::Full },
                Code::FailedPrecondition,
            ),
            (ApiError::ModeUnavailable { mode: Mode::Bwrap }, Code::FailedPrecondition),
            (
                ApiError::CommandNotAllowed { rule: "command.max_length".into(), message: "too long".into() },
                Code::FailedPrecondition,
            ),
            (ApiError::File(Refused::new(FileRefusalReason::Absent, "path")), Code::NotFound),
            (ApiError::DeadlineExceeded, Code::DeadlineExceeded),
            (ApiError::ShuttingDown, Code::Unavailable),
            (ApiError::Unavailable { detail: "secret".into() }, Code::Unavailable),
            (ApiError::internal("secret"), Code::Internal),
        ]
    }

    #[test]
    fn every_error_has_its_code_and_an_upper_case_reason_of_our_domain() {
        for (error, code) in every_error() {
            let status = Status::from(error.clone());
            let info = status.get_details_error_info().unwrap();
            assert_eq!(status.code(), code, "{error:?}");
            assert_eq!(info.domain, "codelia");
            assert!(info.reason.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{}", info.reason);
        }
    }

    #[test]
    fn internal_detail_never_reaches_the_caller() {
        for (error, _) in every_error() {
            let status = Status::from(error);
            assert!(!status.message().contains("secret"));
            assert!(!String::from_utf8_lossy(status.details()).contains("secret"));
        }
    }

    #[test]
    fn an_invalid_field_is_named_twice() {
        let status = Status::from(ApiError::invalid("argv", "is empty").within("command"));
        let bad = status.get_details_bad_request().unwrap();
        assert_eq!(bad.field_violations[0].field, "command.argv");
        assert_eq!(status.get_details_error_info().unwrap().metadata["field"], "command.argv");
    }

    #[test]
    fn a_quota_is_named_and_what_may_be_retried_says_when() {
        let status = Status::from(ApiError::RateLimited { retry_after: Duration::from_millis(5) });
        assert_eq!(status.get_details_error_info().unwrap().metadata["quota"], "requests_per_second");
        assert_eq!(status.get_details_quota_failure().unwrap().violations.len(), 1);
        let delay = status.get_details_retry_info().unwrap().retry_delay;
        assert_eq!(delay, Some(Duration::from_millis(5)));
    }
}
