//! Audit of refusals: a request that a policy, an isolation floor or a quota forbids is recorded as
//! an event. A malformed request is not.

use codelia_store::{Caller, EventBody, EventKind, EventSubject, SessionRef, Store};
use serde_json::json;

use crate::status::{ApiError, ApprovalError, ToolError};

/// Fields whose refusal is an access decision; in any other field it is a mistake of the caller.
const AUDITED_FIELDS: [&str; 5] = ["policy", "limits", "mode", "network", "tool"];

/// Records the error if it is a refusal. A failure of the store is logged and does not change the
/// response.
pub(crate) async fn record(
    store: &Store,
    caller: &Caller,
    kind: EventKind,
    session: Option<&SessionRef>,
    error: &ApiError,
) {
    let Some(field) = audited_field(error) else { return };
    let subject = EventSubject {
        tenant: Some(caller.tenant.clone()),
        session: session.and_then(|session| match session {
            SessionRef::Id(id) => Some(*id),
            SessionRef::Alias(_) => None,
        }),
        key: Some(caller.key),
        ..EventSubject::default()
    };
    let detail = json!({ "reason": error.reason().as_str(), "message": error.text() });
    let body = EventBody { kind, field: Some(field), detail };
    if let Err(error) = store.event_insert(&subject, &body).await {
        tracing::warn!(%error, "cannot record refusal");
    }
}

/// The field or quota that a refusal is about; `None` for any other error.
fn audited_field(error: &ApiError) -> Option<String> {
    match error {
        ApiError::InvalidField { field, .. } => {
            let first = field.split('.').find(|part| *part != "start")?;
            AUDITED_FIELDS.contains(&first).then(|| field.clone())
        }
        ApiError::QuotaExceeded { quota } => Some(format!("quotas.{quota}")),
        ApiError::ModeNotAllowed { .. } | ApiError::BelowFloor { .. } | ApiError::ModeUnavailable { .. } => {
            Some("mode".to_owned())
        }
        ApiError::Approval(ApprovalError::TooMany { .. }) => Some("network".to_owned()),
        ApiError::Tool(ToolError::Quarantined { .. } | ToolError::NotApproved { .. }) => {
            Some("tool".to_owned())
        }
        ApiError::SessionQuarantined { .. } => Some("session".to_owned()),
        ApiError::CommandNotAllowed { rule, .. } => Some(format!("policy.{rule}")),
        ApiError::File(error) => error.denied_by(),
        ApiError::NotFound { .. }
        | ApiError::Unauthenticated
        | ApiError::KeyExpired
        | ApiError::TenantSuspended
        | ApiError::WorkerDrainsItself
        | ApiError::TenantNotEmpty { .. }
        | ApiError::TenantDeleted
        | ApiError::ScopeMissing { .. }
        | ApiError::RateLimited { .. }
        | ApiError::TooManyFailedKeys { .. }
        | ApiError::TooManyCalls { .. }
        | ApiError::RequestStalled
        | ApiError::TooManyPolicyChecks { .. }
        | ApiError::IdempotencyKeyReused
        | ApiError::AliasInUse
        | ApiError::TenantExists
        | ApiError::SessionEnded { .. }
        | ApiError::RunNotRunning
        | ApiError::WorkerOutdated
        | ApiError::ChangesNotHeld { .. }
        | ApiError::SessionDataLost
        | ApiError::OutputExpired
        | ApiError::OutputDataLost { .. }
        | ApiError::Approval(_)
        | ApiError::Flag(_)
        | ApiError::Tool(ToolError::Changed { .. } | ToolError::TooMany)
        | ApiError::Volume(_)
        | ApiError::PolicyChanged { .. }
        | ApiError::TooManyPolicies
        | ApiError::NoSecretKey
        | ApiError::AuditUnsigned
        | ApiError::DeadlineExceeded
        | ApiError::QueryTimeout
        | ApiError::ShuttingDown
        | ApiError::Unavailable { .. }
        | ApiError::Internal { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use codelia_types::Mode;

    use super::*;

    #[test]
    fn only_access_decisions_are_recorded() {
        let invalid = |field: &str| audited_field(&ApiError::invalid(field, "forbidden"));
        assert_eq!(invalid("limits.memory_bytes").as_deref(), Some("limits.memory_bytes"));
        assert_eq!(invalid("policy.process.allow_fork").as_deref(), Some("policy.process.allow_fork"));
        assert_eq!(invalid("command.argv"), None);
        assert_eq!(invalid("page_token"), None);
        let quota = audited_field(&ApiError::QuotaExceeded { quota: "sessions" });
        assert_eq!(quota.as_deref(), Some("quotas.sessions"));
        let mode = audited_field(&ApiError::ModeNotAllowed { mode: Mode::Logical });
        assert_eq!(mode.as_deref(), Some("mode"));
        assert_eq!(audited_field(&ApiError::not_found("session", "dev")), None);
    }
}
