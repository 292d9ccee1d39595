//! Deletes volumes that were not used for long, and the least recently used of tenants that have
//! too much. Never one that a session mounts.

use codelia_types::TenantId;
use serde_json::json;
use uuid::Uuid;

use super::MAX_VOLUMES_BYTES;
use crate::{Error, EventBody, EventKind, EventSubject, Store, row};

impl Store {
    /// Deletes volumes that are to go. Returns how many.
    pub async fn volume_purge_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let found = sqlx::query!(
            r#"SELECT id AS "id!", used_at + ttl < now() AS "is_expired!" FROM (
                   SELECT id, used_at, ttl,
                          -- With all that were used later.
                          sum(used_bytes) OVER (PARTITION BY tenant_id ORDER BY used_at DESC, id DESC) AS bytes
                   FROM volumes
               ) ranked
               WHERE (used_at + ttl < now() OR bytes > $1::bigint)
                 AND NOT EXISTS (SELECT 1 FROM volume_mounts m JOIN sessions s ON s.id = m.session_id
                                 WHERE m.volume_id = ranked.id AND s.removed_at IS NULL)
               LIMIT $2"#,
            MAX_VOLUMES_BYTES,
            limit,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        let mut deleted = 0;
        for volume in found {
            let reason = if volume.is_expired { "expired" } else { "evicted" };
            deleted += u64::from(self.volume_remove_unused(volume.id, reason).await?);
        }
        Ok(deleted)
    }

    /// Deletes a volume unless a session mounts it.
    async fn volume_remove_unused(&self, id: Uuid, reason: &str) -> Result<bool, Error> {
        let mut tx = self.pools.upkeep.begin().await?;
        // As in `volume_delete`.
        sqlx::query!("SELECT id FROM volumes WHERE id = $1 FOR UPDATE", id)
            .fetch_optional(&mut *tx)
            .await?;
        let deleted = sqlx::query!(
            "DELETE FROM volumes v WHERE v.id = $1
                 AND NOT EXISTS (SELECT 1 FROM volume_mounts m JOIN sessions s ON s.id = m.session_id
                                 WHERE m.volume_id = v.id AND s.removed_at IS NULL)
             RETURNING tenant_id, name, used_bytes",
            id,
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(deleted) = deleted else { return Ok(false) };
        let tenant: TenantId = row::parse("volumes.tenant_id", &deleted.tenant_id)?;
        let detail = json!({
            "volume": deleted.name, "id": id.to_string(), "reason": reason, "used_bytes": deleted.used_bytes,
        });
        let subject = EventSubject { tenant: Some(tenant), ..EventSubject::default() };
        let body = EventBody::new(EventKind::VolumeDeleted, detail);
        self.audit.commit(tx, &subject, &body).await?;
        Ok(true)
    }
}
