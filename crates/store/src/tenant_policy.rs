//! The table `tenant_policies`: what operators restrict a tenant to, within the policy of the
//! installation. Each change is a new version; the highest is in effect.

use codelia_policy::{NetworkPolicy, Policy};
use codelia_types::{KeyId, TenantId};
use serde_json::json;
use sqlx::types::Json;
use time::OffsetDateTime;

use crate::{Error, EventBody, EventKind, EventSubject, Store, event};

/// One version of a tenant's policy.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantPolicy {
    /// The version, from 1.
    pub version: i64,
    /// The policy; `None` if the tenant has none from this version on.
    pub policy: Option<Policy>,
    /// The key that set it.
    pub key: KeyId,
    /// Why.
    pub reason: String,
    /// When.
    pub set_at: OffsetDateTime,
}

impl Store {
    /// Sets or clears the policy of a tenant and records an event. Returns `None` if the tenant
    /// does not exist. For operators.
    pub async fn tenant_set_policy(
        &self,
        id: &TenantId,
        policy: Option<&Policy>,
        reason: &str,
        key: KeyId,
    ) -> Result<Option<TenantPolicy>, Error> {
        // Two changes at once get a version each.
        let mut tx = self.tenant_lock(id).await?;
        let inserted = sqlx::query!(
            r#"INSERT INTO tenant_policies (tenant_id, version, policy, key_id, reason)
               SELECT t.id,
                      1 + coalesce((SELECT max(p.version) FROM tenant_policies p WHERE p.tenant_id = t.id), 0),
                      $2, $3, $4
               FROM tenants t WHERE t.id = $1 AND t.deleted_at IS NULL
               RETURNING version, created_at"#,
            id.as_str(),
            policy.map(Json) as _,
            key.0,
            reason,
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(row) = inserted else { return Ok(None) };
        let subject = EventSubject { tenant: Some(id.clone()), key: Some(key), ..EventSubject::default() };
        let detail = json!({ "version": row.version, "is_cleared": policy.is_none(), "reason": reason });
        let body = EventBody { kind: EventKind::TenantPolicySet, field: Some("policy".to_owned()), detail };
        event::insert(&self.audit, &mut *tx, &subject, &body).await?;
        tx.commit().await?;
        Ok(Some(TenantPolicy {
            version: row.version,
            policy: policy.cloned(),
            key,
            reason: reason.to_owned(),
            set_at: row.created_at,
        }))
    }

    /// Returns a version of a tenant's policy, or the one in effect. `None` if it does not exist.
    pub async fn tenant_policy(
        &self,
        id: &TenantId,
        version: Option<i64>,
    ) -> Result<Option<TenantPolicy>, Error> {
        let row = sqlx::query!(
            r#"SELECT version, policy AS "policy: Json<Policy>", key_id, reason, created_at FROM tenant_policies
               WHERE tenant_id = $1 AND version = coalesce($2, version)
               ORDER BY version DESC LIMIT 1"#,
            id.as_str(),
            version,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(row.map(|row| TenantPolicy {
            version: row.version,
            policy: row.policy.map(|policy| policy.0),
            key: KeyId(row.key_id),
            reason: row.reason,
            set_at: row.created_at,
        }))
    }

    /// Returns the network part of a version of a tenant's policy. For workers.
    pub async fn tenant_network(&self, id: &TenantId, version: i64) -> Result<NetworkPolicy, Error> {
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
