//! Refusals leave a trace: what was asked against a policy, a mode's floor or a quota is an event.
//! What is only malformed is not.

use codelia_store::{Caller, EventBody, EventKind, EventSubject, SessionRef, Store};
use serde_json::json;

use crate::status::ApiError;

/// Fields whose refusal is a decision rather than a mistake.
const DECIDED: [&str; 4] = ["policy", "limits", "mode", "network"];

/// Records a refusal if it is one. The answer does not wait for a store that fails.
pub(crate) async fn record(
    store: &Store,
    caller: &Caller,
    kind: EventKind,
    session: Option<&SessionRef>,
    error: &ApiError,
) {
    let Some(field) = field(error) else { return };
    let concerned = EventSubject {
        tenant: Some(caller.tenant.clone()),
        session: session.and_then(|which| match which {
            SessionRef::Id(id) => Some(*id),
            SessionRef::Alias(_) => None,
        }),
        key: Some(caller.key),
        ..EventSubject::default()
    };
    let detail = json!({ "reason": error.reason(), "message": error.text() });
    let happening = EventBody { kind, field: Some(field), detail };
    if let Err(error) = store.event_insert(&concerned, &happening).await {
        tracing::warn!(%error, "a refusal is not recorded");
    }
}

/// The field, mode or quota that a refusal names; `None` for any other error.
fn field(error: &ApiError) -> Option<String> {
    match error {
        ApiError::Invalid { field, .. } => {
            let first = field.split('.').find(|part| *part != "start")?;
            DECIDED.contains(&first).then(|| field.clone())
        }
        ApiError::OverQuota { quota } => Some(format!("quotas.{quota}")),
        ApiError::ModeNotAllowed { .. } | ApiError::BelowFloor { .. } | ApiError::ModeUnavailable { .. } => {
            Some("mode".to_owned())
        }
        ApiError::CommandNotAllowed { rule, .. } => Some(format!("policy.{rule}")),
        ApiError::File(refused) => refused.tried(),
        ApiError::NotFound
        | ApiError::Unauthenticated
        | ApiError::Denied { .. }
        | ApiError::RateLimited { .. }
        | ApiError::KeyReused
        | ApiError::AliasInUse
        | ApiError::TenantExists
        | ApiError::SessionEnded
        | ApiError::SessionDataLost
        | ApiError::DeadlineExceeded
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
    fn decisions_are_told_from_mistakes() {
        let invalid = |field: &str| super::field(&ApiError::invalid(field, "no"));
        assert_eq!(invalid("limits.memory_bytes").as_deref(), Some("limits.memory_bytes"));
        assert_eq!(invalid("policy.process.allow_fork").as_deref(), Some("policy.process.allow_fork"));
        assert_eq!(invalid("command.argv"), None);
        assert_eq!(invalid("page_token"), None);
        let quota = super::field(&ApiError::OverQuota { quota: "sessions" });
        assert_eq!(quota.as_deref(), Some("quotas.sessions"));
        let mode = super::field(&ApiError::ModeNotAllowed { mode: Mode::Logical });
        assert_eq!(mode.as_deref(), Some("mode"));
        assert_eq!(super::field(&ApiError::NotFound), None);
    }
}
