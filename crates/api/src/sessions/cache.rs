//! Cache of session specifications. A specification never changes, so a run need not read it
//! again; the insert of the run checks whether the session is still open.

use std::sync::Arc;

use codelia_store::{Error, SessionRef, SessionSpec, Store};
use codelia_types::{SessionId, TenantId};

use crate::cache::Cache;

/// Specifications of sessions by tenant and id.
#[derive(Debug, Default)]
pub(crate) struct SessionCache(Cache<(TenantId, SessionId), Arc<SessionSpec>>);

impl SessionCache {
    /// Returns a session's id and specification; `None` if the tenant has no such session.
    pub(crate) async fn get(
        &self,
        store: &Store,
        tenant: &TenantId,
        session: &SessionRef,
    ) -> Result<Option<(SessionId, Arc<SessionSpec>)>, Error> {
        // Aliases are not cached: another session may have taken the alias.
        if let SessionRef::Id(id) = session
            && let Some(spec) = self.0.get(&(tenant.clone(), *id))
        {
            return Ok(Some((*id, spec)));
        }
        let Some((id, spec)) = store.session_spec(tenant, session).await? else { return Ok(None) };
        Ok(Some((id, self.insert(tenant, id, spec))))
    }

    /// Remembers the spec of a session.
    pub(crate) fn insert(
        &self,
        tenant: &TenantId,
        id: SessionId,
        spec: SessionSpec,
    ) -> Arc<SessionSpec> {
        let spec = Arc::new(spec);
        self.0.insert((tenant.clone(), id), spec.clone());
        spec
    }
}
