//! Resource names: `sessions/{s}`, `sessions/{s}/runs/{r}`, `tenants/{t}`, `tenants/{t}/keys/{k}`,
//! `tenants/{t}/runs/{r}`, `workers/{w}`, `approvals/{a}`, `flags/{f}`, `volumes/{v}`,
//! `tools/{t}`, `tenants/{t}/tools/{t}`. The last id alone is accepted as well, without what is
//! before it, except for a run of a tenant. Pure.

use std::str::FromStr;

use codelia_store::SessionRef;
use codelia_types::{
    ApprovalId, FlagId, KeyId, RunId, SessionId, TenantId, ToolId, VolumeName, WorkerId,
};

use crate::error::ApiError;

/// The wildcard: any session, or the caller's own tenant.
const WILDCARD: &str = "-";

/// Which sessions a name selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionSelector {
    /// `sessions/-`: every session of the tenant.
    Any,
    /// One session.
    One(SessionRef),
}

/// The name of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunName {
    /// The session that the run must belong to.
    pub(crate) session: SessionSelector,
    /// The run.
    pub(crate) run: RunId,
}

/// The name of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TenantName {
    /// `tenants/-`: the caller's tenant.
    Own,
    /// The tenant with this id.
    Id(TenantId),
}

/// Parses the name of one session.
pub(crate) fn session(field: &str, name: &str) -> Result<SessionRef, ApiError> {
    match session_selector(field, name)? {
        SessionSelector::One(session) => Ok(session),
        SessionSelector::Any => Err(malformed(field, "sessions/{id or alias}")),
    }
}

/// Parses the name of a session, or `sessions/-` for all of them.
pub(crate) fn session_selector(field: &str, name: &str) -> Result<SessionSelector, ApiError> {
    match segments(name).as_slice() {
        ["sessions", id] | [id] => session_segment(id),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "sessions/{id or alias}"))
}

/// Parses the name of a run.
pub(crate) fn run(field: &str, name: &str) -> Result<RunName, ApiError> {
    let error = || malformed(field, "sessions/{session}/runs/{run}");
    match segments(name).as_slice() {
        ["sessions", session, "runs", run] => Ok(RunName {
            session: session_segment(session).ok_or_else(error)?,
            run: run.parse().map_err(|_| error())?,
        }),
        [run] => {
            Ok(RunName { session: SessionSelector::Any, run: run.parse().map_err(|_| error())? })
        }
        _ => Err(error()),
    }
}

/// Parses the name of a tenant.
pub(crate) fn tenant(field: &str, name: &str) -> Result<TenantName, ApiError> {
    match segments(name).as_slice() {
        ["tenants", id] | [id] => tenant_segment(id),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "tenants/{tenant}"))
}

/// Parses the name of a key.
pub(crate) fn key(field: &str, name: &str) -> Result<(TenantName, KeyId), ApiError> {
    match segments(name).as_slice() {
        ["tenants", tenant, "keys", key] => tenant_segment(tenant).zip(key.parse().ok()),
        [key] => key.parse().ok().map(|key| (TenantName::Own, key)),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "tenants/{tenant}/keys/{key}"))
}

/// Parses the name of a run of any tenant.
pub(crate) fn tenant_run(field: &str, name: &str) -> Result<(TenantId, RunId), ApiError> {
    match segments(name).as_slice() {
        ["tenants", tenant, "runs", run] if *tenant != WILDCARD => {
            tenant.parse().ok().zip(run.parse().ok())
        }
        _ => None,
    }
    .ok_or_else(|| malformed(field, "tenants/{tenant}/runs/{run}"))
}

/// Parses the name of a worker.
pub(crate) fn worker(field: &str, name: &str) -> Result<WorkerId, ApiError> {
    plain(field, name, "workers", "workers/{worker}")
}

/// Parses the name of a mode flag.
pub(crate) fn flag(field: &str, name: &str) -> Result<FlagId, ApiError> {
    plain(field, name, "flags", "flags/{flag}")
}

/// Parses the name of a tool.
pub(crate) fn tool(field: &str, name: &str) -> Result<(TenantName, ToolId), ApiError> {
    match segments(name).as_slice() {
        ["tenants", tenant, "tools", id] => tenant_segment(tenant).zip(id.parse().ok()),
        ["tools", id] | [id] => id.parse().ok().map(|id| (TenantName::Own, id)),
        _ => None,
    }
    .ok_or_else(|| malformed(field, "tools/{tool}"))
}

/// Parses the name of a volume of the caller's tenant.
pub(crate) fn volume(field: &str, name: &str) -> Result<VolumeName, ApiError> {
    plain(field, name, "volumes", "volumes/{volume}")
}

/// Parses the name of an approval.
pub(crate) fn approval(field: &str, name: &str) -> Result<ApprovalId, ApiError> {
    plain(field, name, "approvals", "approvals/{approval}")
}

/// The error for a session that does not exist or belongs to another tenant.
pub(crate) fn session_not_found(session: &SessionRef) -> ApiError {
    match session {
        SessionRef::Id(id) => ApiError::not_found("session", id),
        SessionRef::Alias(alias) => ApiError::not_found("session", alias),
    }
}

/// Whether the text is a valid alias, which cannot be taken for an id or the wildcard.
pub(crate) fn is_alias(text: &str) -> bool {
    let label = (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    label && text != WILDCARD && text.parse::<SessionId>().is_err()
}

/// Parses the name of an object that is in no other one.
fn plain<Id: FromStr>(
    field: &str,
    name: &str,
    collection: &str,
    form: &str,
) -> Result<Id, ApiError> {
    let id = match segments(name).as_slice() {
        [first, id] if *first == collection => Some(*id),
        [id] => Some(*id),
        _ => None,
    };
    id.and_then(|id| id.parse().ok()).ok_or_else(|| malformed(field, form))
}

fn segments(name: &str) -> Vec<&str> {
    name.splitn(5, '/').collect()
}

fn session_segment(text: &str) -> Option<SessionSelector> {
    if text == WILDCARD {
        return Some(SessionSelector::Any);
    }
    if let Ok(id) = text.parse() {
        return Some(SessionSelector::One(SessionRef::Id(id)));
    }
    is_alias(text).then(|| SessionSelector::One(SessionRef::Alias(text.to_owned())))
}

fn tenant_segment(text: &str) -> Option<TenantName> {
    if text == WILDCARD { Some(TenantName::Own) } else { text.parse().ok().map(TenantName::Id) }
}

fn malformed(field: &str, form: &str) -> ApiError {
    ApiError::invalid(field, format!("must have the form `{form}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "018f4e1c-7b2a-7c3d-8e4f-5a6b7c8d9e0f";

    #[test]
    fn session_is_named_by_id_or_alias() {
        let id = ID.parse().unwrap();
        assert_eq!(session("name", &format!("sessions/{ID}")), Ok(SessionRef::Id(id)));
        assert_eq!(session("name", "sessions/build-7"), Ok(SessionRef::Alias("build-7".into())));
        assert_eq!(session_selector("parent", "sessions/-"), Ok(SessionSelector::Any));
    }

    #[test]
    fn run_is_named_in_one_or_any_session() {
        let run_id = ID.parse().unwrap();
        let any = RunName { session: SessionSelector::Any, run: run_id };
        assert_eq!(run("name", &format!("sessions/-/runs/{ID}")), Ok(any));
        let named = run("name", &format!("sessions/a/runs/{ID}")).unwrap();
        assert_eq!(named.session, SessionSelector::One(SessionRef::Alias("a".into())));
    }

    #[test]
    fn id_alone_is_a_name() {
        assert_eq!(session("name", ID), Ok(SessionRef::Id(ID.parse().unwrap())));
        assert_eq!(session("name", "dev"), Ok(SessionRef::Alias("dev".into())));
        let any = RunName { session: SessionSelector::Any, run: ID.parse().unwrap() };
        assert_eq!(run("name", ID), Ok(any));
        assert_eq!(tenant("name", "team-7"), Ok(TenantName::Id("team-7".parse().unwrap())));
        assert_eq!(worker("name", "w-1"), Ok("w-1".parse().unwrap()));
        assert_eq!(key("name", ID), Ok((TenantName::Own, ID.parse().unwrap())));
        assert_eq!(approval("name", ID), Ok(ID.parse().unwrap()));
        assert_eq!(approval("name", &format!("approvals/{ID}")), Ok(ID.parse().unwrap()));
    }

    #[test]
    fn malformed_names_are_rejected_by_field() {
        for bad in
            ["", "sessions/", "sessions/A", "sessions/a/b", "sessions/a\0", "runs/a", "sessions/-"]
        {
            assert!(
                session("name", bad).is_err_and(|error| error.invalid_field() == Some("name")),
                "{bad:?}"
            );
        }
        for bad in
            ["sessions/-/runs/x", "sessions//runs/x", "sessions/-/runs/", "sessions/-/runs/a/b"]
        {
            assert!(run("name", bad).is_err(), "{bad:?}");
        }
        assert!(key("name", "tenants/-/keys/x").is_err());
        assert!(worker("name", "workers/").is_err());
        assert!(tenant("name", "tenants/A").is_err());
        assert!(approval("name", "approvals/x").is_err());
    }

    #[test]
    fn alias_is_never_taken_for_an_id() {
        assert!(!is_alias(ID));
        assert!(!is_alias(&ID.replace('-', "")));
        assert!(!is_alias("-"));
        assert!(is_alias("a-1"));
    }
}
