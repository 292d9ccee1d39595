//! Finds sessions by name, and explains why a name finds none: nothing has that name, or the session
//! has ended.

use codelia_store::{Session, SessionRef, Store};
use codelia_types::{SessionId, TenantId};

use crate::{resource_name, status::ApiError};

/// Returns a session. An ended one is found by its id only.
pub(crate) async fn find(store: &Store, tenant: &TenantId, name: &SessionRef) -> Result<Session, ApiError> {
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
