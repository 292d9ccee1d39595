//! The only mapping of [`ApiError`]s to gRPC: a code, a stable reason, details for programs.
//! Internal detail is logged here, once, and never sent.

use std::{collections::HashMap, time::Duration};

use codelia_proto::timestamp_to_proto;
use codelia_telemetry::metrics;
use codelia_types::Reason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::{error::ApiError, file::FileError, volume::VolumeError};

/// Names this service, not a host: it is the same on every installation.
const DOMAIN: &str = "codelia.dev";
/// The delay in `RetryInfo` when no better one is known.
const RETRY_DELAY: Duration = Duration::from_secs(1);

impl ApiError {
    /// The stable reason.
    pub(crate) fn reason(&self) -> Reason {
        self.code_and_reason().1
    }

    /// The gRPC code and the stable reason of every error.
    fn code_and_reason(&self) -> (Code, Reason) {
        match self {
            Self::InvalidField { .. } => (Code::InvalidArgument, Reason::InvalidField),
            Self::NotFound { .. } => (Code::NotFound, Reason::NotFound),
            Self::Unauthenticated => (Code::Unauthenticated, Reason::KeyInvalid),
            Self::KeyExpired => (Code::Unauthenticated, Reason::KeyExpired),
            Self::TenantSuspended => (Code::PermissionDenied, Reason::TenantSuspended),
            Self::WorkerDrainsItself => (Code::FailedPrecondition, Reason::WorkerDrainsItself),
            Self::ScopeMissing { .. } => (Code::PermissionDenied, Reason::ScopeMissing),
            Self::QuotaExceeded { .. } | Self::DiskQuotaExceeded { .. } => {
                (Code::ResourceExhausted, Reason::QuotaExceeded)
            }
            Self::RateLimited { .. } => (Code::ResourceExhausted, Reason::RateLimited),
            Self::TooManyFailedKeys { .. } => (Code::ResourceExhausted, Reason::TooManyFailedKeys),
            Self::TooManyCalls { .. } => (Code::ResourceExhausted, Reason::TooManyCalls),
            Self::RequestStalled => (Code::Aborted, Reason::StreamStalled),
            Self::TooManyPolicyChecks { .. } => (Code::ResourceExhausted, Reason::RateLimited),
            Self::IdempotencyKeyReused => (Code::AlreadyExists, Reason::IdempotencyKeyReused),
            Self::AliasInUse => (Code::AlreadyExists, Reason::AliasInUse),
            Self::TenantNotEmpty { .. } => (Code::FailedPrecondition, Reason::TenantNotEmpty),
            Self::TenantDeleted => (Code::FailedPrecondition, Reason::TenantDeleted),
            Self::TenantExists => (Code::AlreadyExists, Reason::TenantExists),
            Self::SessionEnded { .. } => (Code::FailedPrecondition, Reason::SessionEnded),
            Self::ChangesNotHeld { .. } => (Code::FailedPrecondition, Reason::ChangesNotHeld),
            Self::WorkerOutdated => (Code::FailedPrecondition, Reason::WorkerOutdated),
            Self::RunNotRunning => (Code::FailedPrecondition, Reason::RunNotRunning),
            Self::SessionDataLost => (Code::FailedPrecondition, Reason::SessionDataLost),
            Self::SessionQuarantined { .. } => (Code::FailedPrecondition, Reason::SessionQuarantined),
            Self::OutputExpired => (Code::FailedPrecondition, Reason::OutputExpired),
            Self::OutputDataLost { .. } => (Code::DataLoss, Reason::OutputDataLost),
            Self::ModeNotAllowed { .. } => (Code::FailedPrecondition, Reason::ModeNotAllowed),
            Self::BelowFloor { .. } => (Code::FailedPrecondition, Reason::IsolationFloor),
            Self::ModeUnavailable { .. } => (Code::FailedPrecondition, Reason::ModeUnavailable),
            Self::CommandNotAllowed { .. } => (Code::FailedPrecondition, Reason::CommandNotAllowed),
            Self::Approval(error) => error.code_and_reason(),
            Self::Flag(error) => error.code_and_reason(),
            Self::Tool(error) => error.code_and_reason(),
            Self::Volume(error) => error.code_and_reason(),
            Self::PolicyChanged { .. } => (Code::Aborted, Reason::PolicyChanged),
            Self::TooManyPolicies => (Code::ResourceExhausted, Reason::TooManyPolicies),
            Self::NoSecretKey | Self::AuditUnsigned => (Code::FailedPrecondition, Reason::SecretsUnavailable),
            Self::File(error) => error.code_and_reason(),
            Self::DeadlineExceeded => (Code::DeadlineExceeded, Reason::DeadlineExceeded),
            Self::QueryTimeout => (Code::Unavailable, Reason::QueryTimeout),
            Self::ShuttingDown => (Code::Unavailable, Reason::ShuttingDown),
            Self::Unavailable { .. } => (Code::Unavailable, Reason::Unavailable),
            Self::Internal { .. } => (Code::Internal, Reason::Internal),
        }
    }

    fn log(&self) {
        match self {
            Self::Unavailable { detail } => tracing::warn!(detail, "unavailable"),
            Self::QueryTimeout => tracing::warn!("a statement took too long"),
            Self::Internal { detail } => tracing::error!(detail, "internal error"),
            Self::OutputDataLost { object, problem } => tracing::error!(object, problem, "output is lost"),
            Self::InvalidField { .. }
            | Self::NotFound { .. }
            | Self::Unauthenticated
            | Self::KeyExpired
            | Self::TenantSuspended
            | Self::WorkerDrainsItself
            | Self::TenantNotEmpty { .. }
            | Self::TenantDeleted
            | Self::ScopeMissing { .. }
            | Self::QuotaExceeded { .. }
            | Self::DiskQuotaExceeded { .. }
            | Self::RateLimited { .. }
            | Self::TooManyFailedKeys { .. }
            | Self::TooManyCalls { .. }
            | Self::RequestStalled
            | Self::TooManyPolicyChecks { .. }
            | Self::IdempotencyKeyReused
            | Self::AliasInUse
            | Self::TenantExists
            | Self::SessionEnded { .. }
            | Self::RunNotRunning
            | Self::WorkerOutdated
            | Self::ChangesNotHeld { .. }
            | Self::SessionDataLost
            | Self::SessionQuarantined { .. }
            | Self::OutputExpired
            | Self::ModeNotAllowed { .. }
            | Self::BelowFloor { .. }
            | Self::ModeUnavailable { .. }
            | Self::CommandNotAllowed { .. }
            | Self::Approval(_)
            | Self::Flag(_)
            | Self::Tool(_)
            | Self::Volume(_)
            | Self::PolicyChanged { .. }
            | Self::TooManyPolicies
            | Self::NoSecretKey
            | Self::AuditUnsigned
            | Self::File(_)
            | Self::DeadlineExceeded
            | Self::ShuttingDown => tracing::debug!(reason = %self.reason(), "request refused"),
        }
    }

    /// Adds the details of this error and returns the metadata that names the field or quota.
    fn describe(&self, details: &mut ErrorDetails) -> HashMap<String, String> {
        let named = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        match self {
            Self::InvalidField { field, message } => {
                details.add_bad_request_violation(field, message);
                named("field", field)
            }
            Self::QuotaExceeded { quota } => describe_quota(details, quota),
            Self::DiskQuotaExceeded { .. } => describe_quota(details, "disk_bytes"),
            Self::RateLimited { retry_after } => {
                details.set_retry_info(Some(*retry_after));
                describe_quota(details, "requests_per_second")
            }
            Self::TooManyFailedKeys { retry_after } => {
                details.set_retry_info(Some(*retry_after));
                HashMap::new()
            }
            Self::TooManyCalls { limit, .. } => {
                details.set_retry_info(Some(RETRY_DELAY));
                named("limit", limit)
            }
            Self::TooManyPolicyChecks { .. } => {
                details.set_retry_info(Some(RETRY_DELAY));
                describe_quota(details, "policy_checks")
            }
            Self::ScopeMissing { any_of } => named("scopes", &any_of.join(",")),
            Self::IdempotencyKeyReused => named("field", "idempotency_key"),
            Self::AliasInUse => named("field", "alias"),
            Self::NoSecretKey => named("field", "command.secret_env"),
            Self::AuditUnsigned => named("field", "secrets.key_file"),
            Self::OutputDataLost { object, .. } => named("object", object),
            Self::TenantExists => named("field", "tenant_id"),
            Self::SessionQuarantined { .. } => named("field", "session"),
            Self::Approval(error) => error.metadata(),
            Self::Flag(error) => error.metadata(),
            Self::Tool(error) => error.metadata(),
            Self::Volume(error) => describe_volume(details, error),
            Self::PolicyChanged { version } => named("version", &version.to_string()),
            Self::ModeNotAllowed { mode }
            | Self::BelowFloor { mode, .. }
            | Self::ModeUnavailable { mode } => {
                let mut metadata = named("field", "mode");
                metadata.insert("mode".into(), mode.to_string());
                metadata
            }
            Self::CommandNotAllowed { rule, .. } => HashMap::from([
                ("field".to_owned(), "command.argv".to_owned()),
                ("rule".to_owned(), format!("policy.{rule}")),
            ]),
            Self::File(error) => describe_file(details, error),
            Self::ShuttingDown | Self::QueryTimeout | Self::Unavailable { .. } => {
                details.set_retry_info(Some(RETRY_DELAY));
                HashMap::new()
            }
            // The caller's own words: they do not reveal whether another tenant has such a resource.
            Self::NotFound { kind, name } => {
                details.set_resource_info(format!("{DOMAIN}/{kind}"), name, "", self.text());
                HashMap::new()
            }
            Self::SessionEnded { id, reason, at, .. } => {
                details.set_resource_info(format!("{DOMAIN}/session"), id.to_string(), "", self.text());
                HashMap::from([
                    ("end_reason".to_owned(), reason.as_str().to_owned()),
                    ("end_time".to_owned(), timestamp_to_proto(*at).to_string()),
                ])
            }
            Self::Unauthenticated
            | Self::KeyExpired
            | Self::TenantSuspended
            | Self::TooManyPolicies
            | Self::WorkerDrainsItself
            | Self::TenantNotEmpty { .. }
            | Self::TenantDeleted
            | Self::RunNotRunning
            | Self::WorkerOutdated
            | Self::ChangesNotHeld { .. }
            | Self::SessionDataLost
            | Self::OutputExpired
            | Self::DeadlineExceeded
            | Self::RequestStalled
            | Self::Internal { .. } => HashMap::new(),
        }
    }
}

fn describe_quota(details: &mut ErrorDetails, quota: &str) -> HashMap<String, String> {
    details.add_quota_failure_violation("tenants/-", format!("quota `{quota}` reached"));
    HashMap::from([("quota".to_owned(), quota.to_owned())])
}

fn describe_volume(details: &mut ErrorDetails, error: &VolumeError) -> HashMap<String, String> {
    match error {
        VolumeError::TooMany => describe_quota(details, "volumes"),
        VolumeError::InUse { .. } | VolumeError::Exists(_) => error.metadata(),
    }
}

fn describe_file(details: &mut ErrorDetails, error: &FileError) -> HashMap<String, String> {
    if error.is_retryable() {
        details.set_retry_info(Some(RETRY_DELAY));
    }
    let mut metadata = HashMap::from([("field".to_owned(), error.field.clone())]);
    metadata.extend(error.rule().map(|rule| ("rule".to_owned(), rule)));
    if let Some((limit, used, max)) = error.exceeded() {
        metadata.insert("limit".to_owned(), limit.to_owned());
        metadata.insert("used".to_owned(), used.to_string());
        metadata.insert("max".to_owned(), max.to_string());
    }
    if let Some((member, entries)) = error.import() {
        metadata.insert("member".to_owned(), member.to_owned());
        metadata.insert("imported_entries".to_owned(), entries.to_string());
    }
    metadata
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        error.log();
        let (code, reason) = error.code_and_reason();
        metrics().refused(reason.as_str());
        match &error {
            ApiError::QuotaExceeded { quota } => metrics().quota_refused(quota),
            ApiError::DiskQuotaExceeded { .. } => metrics().quota_refused("disk_bytes"),
            ApiError::RateLimited { .. } => metrics().quota_refused("requests_per_second"),
            _ => {}
        }
        let mut details = ErrorDetails::new();
        let metadata = error.describe(&mut details);
        details.set_error_info(reason.as_str(), DOMAIN, metadata);
        Status::with_error_details(code, error.text(), details)
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::IsolationLevel;
    use codelia_proto::internal::v1::FileRefusalReason;
    use codelia_store::{ApprovalState, SessionEndReason};
    use codelia_types::{ApprovalId, Mode, SessionId};
    use time::OffsetDateTime;

    use super::*;
    use crate::status::ApprovalError;

    fn ended(reason: SessionEndReason) -> ApiError {
        let id = SessionId(uuid::Uuid::nil());
        ApiError::SessionEnded { id, alias: Some("dev".into()), reason, at: OffsetDateTime::UNIX_EPOCH }
    }

    #[test]
    fn ended_session_says_when_and_why() {
        let status = Status::from(ended(SessionEndReason::Idle));
        assert_eq!(
            status.message(),
            "session \"dev\" ended at 1970-01-01T00:00:00Z: it was idle for its idle_ttl; create a new one"
        );
        let metadata = status.get_details_error_info().unwrap().metadata;
        assert_eq!(
            (metadata["end_reason"].as_str(), metadata["end_time"].as_str()),
            ("idle", "1970-01-01T00:00:00Z")
        );
    }

    fn every_error() -> Vec<(ApiError, Code)> {
        let (id, state) = (ApprovalId(uuid::Uuid::nil()), ApprovalState::Expired);
        vec![
            (ApiError::invalid("command.argv", "must not be empty"), Code::InvalidArgument),
            (ApiError::not_found("session", "dev"), Code::NotFound),
            (ApiError::Unauthenticated, Code::Unauthenticated),
            (ApiError::KeyExpired, Code::Unauthenticated),
            (ApiError::TenantSuspended, Code::PermissionDenied),
            (ApiError::WorkerDrainsItself, Code::FailedPrecondition),
            (ApiError::TenantNotEmpty { sessions: 1 }, Code::FailedPrecondition),
            (ApiError::TenantDeleted, Code::FailedPrecondition),
            (ApiError::ScopeMissing { any_of: vec!["run"] }, Code::PermissionDenied),
            (ApiError::QuotaExceeded { quota: "sessions" }, Code::ResourceExhausted),
            (ApiError::DiskQuotaExceeded { used: 2, quota: 1 }, Code::ResourceExhausted),
            (ApiError::RateLimited { retry_after: Duration::from_millis(5) }, Code::ResourceExhausted),
            (ApiError::TooManyFailedKeys { retry_after: Duration::from_secs(5) }, Code::ResourceExhausted),
            (ApiError::TooManyCalls { limit: "max_calls_per_key", max: 5 }, Code::ResourceExhausted),
            (ApiError::RequestStalled, Code::Aborted),
            (ApiError::TooManyPolicyChecks { max_waiting: 1 }, Code::ResourceExhausted),
            (ApiError::IdempotencyKeyReused, Code::AlreadyExists),
            (ApiError::AliasInUse, Code::AlreadyExists),
            (ApiError::TenantExists, Code::AlreadyExists),
            (ended(SessionEndReason::Closed), Code::FailedPrecondition),
            (ApiError::RunNotRunning, Code::FailedPrecondition),
            (ApiError::WorkerOutdated, Code::FailedPrecondition),
            (ApiError::ChangesNotHeld { state: None }, Code::FailedPrecondition),
            (ApiError::SessionDataLost, Code::FailedPrecondition),
            (ApiError::OutputExpired, Code::FailedPrecondition),
            (ApiError::OutputDataLost { object: "o".into(), problem: "not found".into() }, Code::DataLoss),
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
            (
                ApiError::Approval(ApprovalError::TooMany { message: "the tenant has 200".into() }),
                Code::ResourceExhausted,
            ),
            (ApiError::Approval(ApprovalError::OwnRequest), Code::PermissionDenied),
            (
                ApiError::Approval(ApprovalError::Decided { id, state, decided_by: None }),
                Code::FailedPrecondition,
            ),
            (
                ApiError::Approval(ApprovalError::NotGranted { id, state, is_revoked: false }),
                Code::FailedPrecondition,
            ),
            (ApiError::File(FileError::new(FileRefusalReason::Absent, "path")), Code::NotFound),
            (ApiError::DeadlineExceeded, Code::DeadlineExceeded),
            (ApiError::ShuttingDown, Code::Unavailable),
            (ApiError::unavailable("secret"), Code::Unavailable),
            (ApiError::QueryTimeout, Code::Unavailable),
            (ApiError::internal("secret"), Code::Internal),
        ]
    }

    #[test]
    fn every_error_has_code_reason_and_domain() {
        for (error, code) in every_error() {
            let status = Status::from(error.clone());
            let info = status.get_details_error_info().unwrap();
            assert_eq!(status.code(), code, "{error:?}");
            assert_eq!(info.domain, "codelia.dev");
            assert_ne!(error.reason(), Reason::Unknown, "{error:?}");
            assert!(info.reason.bytes().all(|b| b.is_ascii_uppercase() || b == b'_'), "{}", info.reason);
        }
    }

    #[test]
    fn internal_detail_never_reaches_caller() {
        for (error, _) in every_error() {
            let status = Status::from(error);
            assert!(!status.message().contains("secret"));
            assert!(!String::from_utf8_lossy(status.details()).contains("secret"));
        }
    }

    #[test]
    fn invalid_field_is_in_both_details() {
        let status = Status::from(ApiError::invalid("argv", "must not be empty").within("command"));
        let bad = status.get_details_bad_request().unwrap();
        assert_eq!(bad.field_violations[0].field, "command.argv");
        assert_eq!(status.get_details_error_info().unwrap().metadata["field"], "command.argv");
    }

    #[test]
    fn rate_limit_names_quota_and_retry_delay() {
        let status = Status::from(ApiError::RateLimited { retry_after: Duration::from_millis(5) });
        assert_eq!(status.get_details_error_info().unwrap().metadata["quota"], "requests_per_second");
        assert_eq!(status.get_details_quota_failure().unwrap().violations.len(), 1);
        let delay = status.get_details_retry_info().unwrap().retry_delay;
        assert_eq!(delay, Some(Duration::from_millis(5)));
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
}
