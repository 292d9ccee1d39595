//! The network policies of tenants, one version of each, so that a version is read once.

use std::{collections::HashMap, sync::Arc};

use codelia_policy::NetworkPolicy;
use codelia_store::{Error, SessionNetwork, Store};
use codelia_types::TenantId;
use parking_lot::Mutex;

use super::rules::Lists;

/// The copies are dropped when there are this many.
const MAX_ENTRIES: usize = 256;

/// Network policies by tenant, each with its version.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    known: Mutex<HashMap<TenantId, (i64, Arc<NetworkPolicy>)>>,
}

impl Tenants {
    /// The lists that hold for a session of a tenant now.
    pub(super) async fn lists(
        &self,
        store: &Store,
        tenant: &TenantId,
        session: SessionNetwork,
    ) -> Result<Lists, Error> {
        let SessionNetwork { network, tenant_version, .. } = session;
        let Some(version) = tenant_version else {
            return Ok(Lists { session: network, tenant: None });
        };
        let known = self.known.lock().get(tenant).filter(|(of, _)| *of == version).cloned();
        let network_of_tenant = match known {
            Some((_, known)) => known,
            None => {
                let read = Arc::new(store.tenant_network(tenant, version).await?);
                let mut known = self.known.lock();
                if known.len() >= MAX_ENTRIES {
                    known.clear();
                }
                known.insert(tenant.clone(), (version, read.clone()));
                read
            }
        };
        Ok(Lists { session: network, tenant: Some(network_of_tenant) })
    }
}
