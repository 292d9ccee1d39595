//! The table `tenant_policies`: what operators restrict a tenant to, within the policy of the
//! installation. `scope_policy.rs` changes it.

use codelia_policy::NetworkPolicy;
use codelia_types::TenantId;
use sqlx::types::Json;

use crate::{Error, Store};

impl Store {
    /// Returns the network part of a version of a tenant's policy. For workers.
    pub async fn tenant_network(
        &self,
        id: &TenantId,
        version: i64,
    ) -> Result<NetworkPolicy, Error> {
        let network = sqlx::query_scalar!(
            r#"SELECT policy -> 'network' AS "network: Json<NetworkPolicy>" FROM tenant_policies
               WHERE tenant_id = $1 AND version = $2"#,
            id.as_str(),
            version,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let network = network.ok_or(Error::RowMissing { what: "policy of a tenant" })?;
        Ok(network.map(|network| network.0).unwrap_or_default())
    }
}
