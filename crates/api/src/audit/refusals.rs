//! Audit of refusals: a request that a policy, an isolation floor or a quota forbids is recorded as
//! an event. A malformed request is not.

use codelia_store::{Caller, EventBody, EventKind, EventSubject, SessionRef, Store};
use codelia_types::Reason;
use serde_json::json;

use crate::error::ApiError;

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
    if let Err(error) = store.audit_insert(&subject, &body).await {
        tracing::warn!(%error, "cannot record refusal");
    }
}

/// The field or quota that a refusal is about; `None` for any other error.
fn audited_field(error: &ApiError) -> Option<String> {
    match error.reason() {
        Reason::InvalidField => {
            let field = error.invalid_field()?;
            let first = field.split('.').find(|part| *part != "start")?;
            AUDITED_FIELDS.contains(&first).then(|| field.to_owned())
        }
        Reason::QuotaExceeded => Some(format!("quotas.{}", error.named("quota")?)),
        Reason::TooManyApprovals => Some("network".to_owned()),
        Reason::CommandNotAllowed | Reason::PathDenied => error.named("rule").map(str::to_owned),
        Reason::ModeNotAllowed
        | Reason::IsolationFloor
        | Reason::ModeUnavailable
        | Reason::ToolQuarantined
        | Reason::ToolNotApproved
        | Reason::SessionQuarantined
        | Reason::PathLeadsOut => error.named("field").map(str::to_owned),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use codelia_types::Mode;

    use super::*;
    use crate::admission::mode_not_allowed;

    #[test]
    fn only_access_decisions_are_recorded() {
        let invalid = |field: &str| audited_field(&ApiError::invalid(field, "forbidden"));
        assert_eq!(invalid("limits.memory_bytes").as_deref(), Some("limits.memory_bytes"));
        assert_eq!(
            invalid("policy.process.allow_fork").as_deref(),
            Some("policy.process.allow_fork")
        );
        assert_eq!(invalid("command.argv"), None);
        assert_eq!(invalid("page_token"), None);
        let quota = audited_field(&ApiError::quota_exceeded("sessions"));
        assert_eq!(quota.as_deref(), Some("quotas.sessions"));
        let mode = audited_field(&mode_not_allowed(Mode::Logical));
        assert_eq!(mode.as_deref(), Some("mode"));
        assert_eq!(audited_field(&ApiError::not_found("session", "dev")), None);
    }
}
