//! Finds sessions by name, and explains why a name finds none: nothing has that name, or the
//! session has ended.

use codelia_proto::timestamp_to_proto;
use codelia_store::{Session, SessionEndReason, SessionRef, Store};
use codelia_types::{Reason, SessionId, TenantId};
use time::OffsetDateTime;

use crate::{error::ApiError, wire::resource_name};

/// Returns a session. An ended one is found by its id only.
pub(crate) async fn find(
    store: &Store,
    tenant: &TenantId,
    name: &SessionRef,
) -> Result<Session, ApiError> {
    match store.session_get(tenant, name).await? {
        Some(session) => Ok(session),
        None => Err(missing(store, tenant, name).await),
    }
}

/// The error for a name that finds no session: the last session with this alias has ended, or there
/// was none.
pub(crate) async fn missing(store: &Store, tenant: &TenantId, name: &SessionRef) -> ApiError {
    let SessionRef::Alias(alias) = name else { return resource_name::session_not_found(name) };
    match store.session_last_ended(tenant, alias).await {
        Ok(Some(session)) => ApiError::session_ended(&session),
        Ok(None) => resource_name::session_not_found(name),
        Err(error) => error.into(),
    }
}

/// The error for a session that does not accept runs or file calls any more.
pub(crate) async fn ended(store: &Store, tenant: &TenantId, id: SessionId) -> ApiError {
    match store.session_get(tenant, &SessionRef::Id(id)).await {
        Ok(Some(session)) => ApiError::session_ended(&session),
        Ok(None) => ApiError::not_found("session", id),
        Err(error) => error.into(),
    }
}

impl ApiError {
    /// A session that has ended, or is about to because it has expired.
    pub(crate) fn session_ended(session: &Session) -> Self {
        ended_error(
            session.id,
            session.alias.as_deref(),
            session.end_reason.unwrap_or(SessionEndReason::Expired),
            session.ended_at.unwrap_or(session.expires_at),
        )
    }

    /// The files of the session are lost.
    pub(crate) fn session_data_lost() -> Self {
        let message =
            "the session's files are lost or their worker is unavailable; create a new session";
        Self::new(Reason::SessionDataLost, message)
    }

    /// The session is quarantined.
    pub(crate) fn session_quarantined(id: SessionId, why: &str) -> Self {
        let message = format!(
            "session: {id} is quarantined: {why}; an administrator releases it with `codelia session \
             release {id}`"
        );
        Self::new(Reason::SessionQuarantined, message).with("field", "session")
    }
}

fn ended_error(
    id: SessionId,
    alias: Option<&str>,
    reason: SessionEndReason,
    at: OffsetDateTime,
) -> ApiError {
    let why = match reason {
        SessionEndReason::Closed => "it was closed",
        SessionEndReason::Expired => "it reached its expire_time",
        SessionEndReason::Idle => "it was idle for its idle_ttl",
        SessionEndReason::DataLost => "its files were lost",
    };
    let id = id.to_string();
    let name = alias.unwrap_or(&id);
    let at = timestamp_to_proto(at);
    let message = format!("session {name:?} ended at {at}: {why}; create a new one");
    ApiError::new(Reason::SessionEnded, message)
        .with("end_reason", reason.as_str())
        .with("end_time", at)
        .of_resource("session", id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_session_says_when_and_why() {
        let id = SessionId(uuid::Uuid::nil());
        let error =
            ended_error(id, Some("dev"), SessionEndReason::Idle, OffsetDateTime::UNIX_EPOCH);
        assert_eq!(
            error.text(),
            "session \"dev\" ended at 1970-01-01T00:00:00Z: it was idle for its idle_ttl; create a new one"
        );
        assert_eq!(error.named("end_reason"), Some("idle"));
        assert_eq!(error.named("end_time"), Some("1970-01-01T00:00:00Z"));
    }
}
