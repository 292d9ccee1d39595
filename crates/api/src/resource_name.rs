//! Resource names: `sessions/{s}`, `sessions/{s}/runs/{r}`, `tenants/{t}`, `tenants/{t}/keys/{k}`,
//! `workers/{w}`. Pure.

use codelia_store::SessionRef;
use codelia_types::{KeyId, RunId, SessionId, TenantId, WorkerId};

use crate::status::ApiError;

/// Stands for any session, or for the caller's own tenant.
const ANY: &str = "-";

/// A run as a caller names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunName {
    /// The session it must belong to; `None` for any.
    pub(crate) session: Option<SessionRef>,
    /// The run.
    pub(crate) run: RunId,
}

/// A tenant as a caller names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TenantName {
    /// The caller's own.
    Own,
    /// This one.
    Id(TenantId),
}

pub(crate) fn session(field: &str, name: &str) -> Result<SessionRef, ApiError> {
    any_session(field, name)?.ok_or_else(|| malformed(field, "sessions/{id or alias}"))
}

/// Reads a session's name where `sessions/-` stands for all.
pub(crate) fn any_session(field: &str, name: &str) -> Result<Option<SessionRef>, ApiError> {
    match segments(name).as_slice() {
        ["sessions", id] => session_segment(id),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "sessions/{id or alias}"))
}

pub(crate) fn run(field: &str, name: &str) -> Result<RunName, ApiError> {
    let wrong = || malformed(field, "sessions/{session}/runs/{run}");
    match segments(name).as_slice() {
        ["sessions", session, "runs", run] => Ok(RunName {
            session: session_segment(session).ok_or_else(wrong)?,
            run: run.parse().map_err(|_| wrong())?,
        }),
        _ => Err(wrong()),
    }
}

pub(crate) fn tenant(field: &str, name: &str) -> Result<TenantName, ApiError> {
    match segments(name).as_slice() {
        ["tenants", id] => tenant_segment(id),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "tenants/{tenant}"))
}

pub(crate) fn key(field: &str, name: &str) -> Result<(TenantName, KeyId), ApiError> {
    match segments(name).as_slice() {
        ["tenants", tenant, "keys", key] => tenant_segment(tenant).zip(key.parse().ok()),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "tenants/{tenant}/keys/{key}"))
}

pub(crate) fn worker(field: &str, name: &str) -> Result<WorkerId, ApiError> {
    match segments(name).as_slice() {
        ["workers", id] => id.parse().ok(),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "workers/{worker}"))
}

/// Whether a session may be called this: a name that cannot be taken for an id or for `-`.
pub(crate) fn is_alias(text: &str) -> bool {
    let label = (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    label && text != ANY && text.parse::<SessionId>().is_err()
}

fn segments(name: &str) -> Vec<&str> {
    name.splitn(5, '/').collect()
}

/// `Some(None)` is any session; `None` is no session's name.
fn session_segment(text: &str) -> Option<Option<SessionRef>> {
    if text == ANY {
        return Some(None);
    }
    if let Ok(id) = text.parse() {
        return Some(Some(SessionRef::Id(id)));
    }
    is_alias(text).then(|| Some(SessionRef::Alias(text.to_owned())))
}

fn tenant_segment(text: &str) -> Option<TenantName> {
    if text == ANY { Some(TenantName::Own) } else { text.parse().ok().map(TenantName::Id) }
}

fn malformed(field: &str, form: &str) -> ApiError {
    ApiError::invalid(field, format!("must have the form `{form}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "018f4e1c-7b2a-7c3d-8e4f-5a6b7c8d9e0f";

    #[test]
    fn a_session_is_named_by_id_or_alias() {
        let id = ID.parse().unwrap();
        assert_eq!(session("name", &format!("sessions/{ID}")), Ok(SessionRef::Id(id)));
        assert_eq!(session("name", "sessions/build-7"), Ok(SessionRef::Alias("build-7".into())));
        assert_eq!(any_session("parent", "sessions/-"), Ok(None));
    }

    #[test]
    fn a_run_is_named_within_a_session_or_any() {
        let run_id = ID.parse().unwrap();
        assert_eq!(run("name", &format!("sessions/-/runs/{ID}")), Ok(RunName { session: None, run: run_id }));
        let named = run("name", &format!("sessions/a/runs/{ID}")).unwrap();
        assert_eq!(named.session, Some(SessionRef::Alias("a".into())));
    }

    #[test]
    fn malformed_names_are_refused_with_the_field() {
        for bad in [
            "",
            "sessions",
            "sessions/",
            "sessions/A",
            "sessions/a/b",
            "sessions/a\0",
            "runs/a",
            "sessions/-",
        ] {
            assert!(
                matches!(session("name", bad), Err(ApiError::Invalid { field, .. }) if field == "name"),
                "{bad:?}"
            );
        }
        for bad in ["sessions/-/runs/x", "sessions//runs/x", "sessions/-/runs/", "sessions/-/runs/a/b"] {
            assert!(run("name", bad).is_err(), "{bad:?}");
        }
        assert!(key("name", "tenants/-/keys/x").is_err());
        assert!(worker("name", "workers/").is_err());
        assert!(tenant("name", "tenants/A").is_err());
    }

    #[test]
    fn an_alias_is_never_taken_for_an_id() {
        assert!(!is_alias(ID));
        assert!(!is_alias(&ID.replace('-', "")));
        assert!(!is_alias("-"));
        assert!(is_alias("a-1"));
    }
}
