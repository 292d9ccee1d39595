//! What sessions were made with, remembered: it never changes, so a run need not read it again. Whether
//! the session is still there is seen when the run is recorded.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use codelia_store::{Error, SessionRef, SessionSpec, Store};
use codelia_types::{SessionId, TenantId};

/// With so many all are forgotten.
const MOST: usize = 4096;

/// Specifications of sessions, by whose they are and id.
#[derive(Debug, Default)]
pub(crate) struct Specs {
    known: Mutex<HashMap<(TenantId, SessionId), Arc<SessionSpec>>>,
}

impl Specs {
    /// A session's id and specification; `None` if the tenant has no such session.
    pub(crate) async fn of(
        &self,
        store: &Store,
        tenant: &TenantId,
        which: &SessionRef,
    ) -> Result<Option<(SessionId, Arc<SessionSpec>)>, Error> {
        // An alias may be another session's by now.
        if let SessionRef::Id(id) = which
            && let Some(spec) = self.recall(tenant, *id)
        {
            return Ok(Some((*id, spec)));
        }
        let Some((id, spec)) = store.run_session(tenant, which).await? else { return Ok(None) };
        Ok(Some((id, self.remember(tenant, id, spec))))
    }

    fn recall(&self, tenant: &TenantId, id: SessionId) -> Option<Arc<SessionSpec>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&(tenant.clone(), id)).cloned()
    }

    fn remember(&self, tenant: &TenantId, id: SessionId, spec: SessionSpec) -> Arc<SessionSpec> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST {
            known.clear();
        }
        let spec = Arc::new(spec);
        known.insert((tenant.clone(), id), spec.clone());
        spec
    }
}
