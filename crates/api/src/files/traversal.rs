//! Paths in file calls that leave the workspace: a sign of an attempt to escape. All such calls are
//! refused; here they are recorded, at most once a minute for each session, so that no caller can
//! fill the database with them.

use std::time::{Duration, Instant};

use codelia_policy::{EscapeResponse, Severity};
use codelia_store::{Caller, EventBody, EventKind, EventSubject, SessionRef};
use codelia_telemetry::metrics;
use codelia_types::SessionId;
use serde_json::{Value, json};

use crate::{context::Context, error::ApiError};

/// Between two records of a session.
pub(crate) const RECORD_INTERVAL: Duration = Duration::from_secs(60);
/// Bytes of a path that are recorded.
const MAX_PATH: usize = 256;
const TYPE: &str = "FILESYSTEM";
const SEVERITY: Severity = Severity::High;

/// Carries out the configured response to a file call that names a path outside the workspace of a
/// session. A failure of the store is logged: the call is refused in any case.
pub(super) async fn report(context: &Context, caller: &Caller, session: &SessionRef, path: &str) {
    metrics().escape.indicator(TYPE, SEVERITY.as_str());
    let response = context.options.escape.response(SEVERITY);
    if response.is_none() {
        return;
    }
    let found = match context.session_cache.get(&context.store, &caller.tenant, session).await {
        Ok(found) => found.map(|(id, _)| id),
        Err(error) => return tracing::warn!(%error, "path outside the workspace not recorded"),
    };
    // Someone guesses names of sessions, or it ended.
    let Some(id) = found else { return };
    if !context.traversals.is_due(id, Instant::now()) {
        return;
    }
    if let Err(error) = record(context, caller, id, path, response).await {
        context.traversals.forget(&id);
        tracing::warn!(%error, session = %id, "path outside the workspace not recorded");
    }
}

async fn record(
    context: &Context,
    caller: &Caller,
    session: SessionId,
    path: &str,
    response: EscapeResponse,
) -> Result<(), ApiError> {
    let store = &context.store;
    let subject = EventSubject {
        tenant: Some(caller.tenant.clone()),
        session: Some(session),
        key: Some(caller.key),
        ..EventSubject::default()
    };
    let event = |kind, detail| EventBody { kind, field: None, detail };
    let detail = detail(path, response, context.options.escape.webhook_url().is_some());
    let quarantined = json!({ "reason": detail["reason"] });
    store.audit_insert(&subject, &event(EventKind::EscapeAttempt, detail)).await?;
    if response.quarantine_session {
        store.audit_insert(&subject, &event(EventKind::SessionQuarantined, quarantined)).await?;
        store.session_cancel_runs(&caller.tenant, session).await?;
    }
    Ok(())
}

/// What is recorded. The path is the caller's text. Nothing runs that could be ended, and no tool
/// is named.
fn detail(path: &str, response: EscapeResponse, has_webhook: bool) -> Value {
    let path = path[..path.floor_char_boundary(MAX_PATH)].replace('\0', "\u{fffd}");
    let description = format!("path traversal in a file call: {path:?}");
    let severity = SEVERITY.as_str();
    json!({
        "severity": severity,
        "reason": format!("{description} ({severity})"),
        "indicators": [{ "type": TYPE, "severity": severity, "description": description }],
        "response": {
            "terminate": false,
            "quarantine_tool": false,
            "quarantine_session": response.quarantine_session,
            "alert": response.alert,
        },
        "tool": null,
        "webhook": response.alert && has_webhook,
        "trace": { "path": path },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_path_is_bounded() {
        let response = "terminate,alert".parse().unwrap();
        let detail = detail(&format!("../{}\0", "é".repeat(5000)), response, true);
        assert!(detail.to_string().len() < 8 * MAX_PATH);
        assert_eq!(
            (&detail["response"]["terminate"], &detail["webhook"]),
            (&json!(false), &json!(true))
        );
    }
}
