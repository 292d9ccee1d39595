//! The table `volumes`: directories of tenants that outlive sessions. A deleted row is gone; the
//! worker that has the directory finds that and removes it.

mod evict;
mod mount;

use std::time::Duration;

use codelia_types::{KeyId, SessionId, TenantId, VolumeId, VolumeName};
use serde_json::json;
use sqlx::PgExecutor;
use time::OffsetDateTime;

pub use self::mount::{MountedVolume, SessionVolumes, VolumesMounted};
use crate::{Error, EventBody, EventKind, EventSubject, Store, row};

/// Volumes of a tenant.
pub const MAX_VOLUMES: i64 = 100;
/// Size of the volumes of a tenant together, in bytes. The least recently used are deleted above
/// it.
pub const MAX_VOLUMES_BYTES: i64 = 20 << 30;

/// A volume of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// The id, which is also the name of its directory.
    pub id: VolumeId,
    /// The name within the tenant.
    pub name: VolumeName,
    /// The project whose sessions may mount it. `None` if every session of the tenant may.
    pub project: Option<String>,
    /// Maximum size of its files in bytes.
    pub max_bytes: i64,
    /// How long it is kept without use.
    pub ttl: Duration,
    /// The key that created it.
    pub key: KeyId,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When a session or a run last used it.
    pub used_at: OffsetDateTime,
    /// Size of its files in bytes, when it was last measured.
    pub used_bytes: i64,
    /// Sessions that mount it and whose files are not removed.
    pub sessions: i64,
}

/// A volume to create.
#[derive(Debug, Clone, Copy)]
pub struct NewVolume<'a> {
    /// The tenant that will own it.
    pub tenant: &'a TenantId,
    /// The name within the tenant.
    pub name: &'a VolumeName,
    /// The project whose sessions may mount it.
    pub project: Option<&'a str>,
    /// Maximum size of its files in bytes.
    pub max_bytes: i64,
    /// How long it is kept without use.
    pub ttl: Duration,
    /// The key that creates it.
    pub key: KeyId,
}

/// Why a volume was not created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeNotCreated {
    /// The tenant has a volume with this name.
    Exists,
    /// The tenant has as many volumes as it may.
    TooMany,
    /// The tenant does not exist any more.
    NoTenant,
}

/// Why a volume was not deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumeNotDeleted {
    /// The tenant has no such volume.
    NotFound,
    /// A session mounts it.
    InUse(SessionId),
}

/// Selects volumes by a condition and its arguments.
macro_rules! select_volumes {
    ($condition:literal, $($argument:expr),*) => {
        sqlx::query!(
            r#"SELECT id, name, project, max_bytes, ttl, key_id, created_at, used_at, used_bytes,
                      (SELECT count(*) FROM volume_mounts m JOIN sessions s ON s.id = m.session_id
                       WHERE m.volume_id = volumes.id AND s.removed_at IS NULL) AS "sessions!"
               FROM volumes WHERE "# + $condition,
            $($argument),*
        )
        .try_map(|row| {
            Ok(Volume {
                id: VolumeId(row.id),
                name: row::parse("volumes.name", &row.name)?,
                project: row.project,
                max_bytes: row.max_bytes,
                ttl: row::duration(&row.ttl),
                key: KeyId(row.key_id),
                created_at: row.created_at,
                used_at: row.used_at,
                used_bytes: row.used_bytes,
                sessions: row.sessions,
            })
        })
    };
}

impl Store {
    /// Creates a volume.
    pub async fn volume_create(
        &self,
        new: NewVolume<'_>,
    ) -> Result<Result<Volume, VolumeNotCreated>, Error> {
        let mut tx = self.tenant_lock(new.tenant).await?;
        if get(&mut *tx, new.tenant, new.name).await?.is_some() {
            return Ok(Err(VolumeNotCreated::Exists));
        }
        let count = sqlx::query_scalar!(
            r#"SELECT count(*) AS "count!" FROM volumes WHERE tenant_id = $1"#,
            new.tenant.as_str()
        );
        if count.fetch_one(&mut *tx).await? >= MAX_VOLUMES {
            return Ok(Err(VolumeNotCreated::TooMany));
        }
        let id = VolumeId::generate();
        sqlx::query!(
            "INSERT INTO volumes (id, tenant_id, name, project, max_bytes, ttl, key_id)
             SELECT $1, t.id, $3, $4, $5, $6, $7 FROM tenants t WHERE t.id = $2 AND t.deleted_at IS NULL",
            id.0,
            new.tenant.as_str(),
            new.name.as_str(),
            new.project,
            new.max_bytes,
            row::interval(new.ttl),
            new.key.0,
        )
        .execute(&mut *tx)
        .await?;
        let Some(volume) = get(&mut *tx, new.tenant, new.name).await? else {
            return Ok(Err(VolumeNotCreated::NoTenant));
        };
        let detail = json!({ "volume": new.name.as_str(), "id": id.to_string(), "max_bytes": new.max_bytes });
        let body = EventBody::new(EventKind::VolumeCreated, detail);
        self.audit.commit(tx, &EventSubject::by(new.key, Some(new.tenant)), &body).await?;
        Ok(Ok(volume))
    }

    /// Returns a volume.
    pub async fn volume_get(
        &self,
        tenant: &TenantId,
        name: &VolumeName,
    ) -> Result<Option<Volume>, Error> {
        get(&self.pools.reads, tenant, name).await
    }

    /// Lists the volumes of a tenant in the order of their names, after `after`.
    pub async fn volume_list(
        &self,
        tenant: &TenantId,
        after: Option<&VolumeName>,
        limit: i64,
    ) -> Result<Vec<Volume>, Error> {
        let page = select_volumes!(
            r#"tenant_id = $1 AND name COLLATE "C" > $2 ORDER BY name COLLATE "C" LIMIT $3"#,
            tenant.as_str(),
            after.map_or("", VolumeName::as_str),
            limit
        );
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Deletes a volume that no session mounts.
    pub async fn volume_delete(
        &self,
        tenant: &TenantId,
        name: &VolumeName,
        key: KeyId,
    ) -> Result<Result<(), VolumeNotDeleted>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        // The lock first: then the next statement sees mounts that were recorded before.
        let locked = sqlx::query_scalar!(
            "SELECT id FROM volumes WHERE tenant_id = $1 AND name = $2 FOR UPDATE",
            tenant.as_str(),
            name.as_str(),
        );
        let Some(id) = locked.fetch_optional(&mut *tx).await? else {
            return Ok(Err(VolumeNotDeleted::NotFound));
        };
        let user = sqlx::query_scalar!(
            "SELECT s.id FROM volume_mounts m JOIN sessions s ON s.id = m.session_id
             WHERE m.volume_id = $1 AND s.removed_at IS NULL LIMIT 1",
            id,
        );
        if let Some(session) = user.fetch_optional(&mut *tx).await? {
            return Ok(Err(VolumeNotDeleted::InUse(SessionId(session))));
        }
        sqlx::query!("DELETE FROM volumes WHERE id = $1", id).execute(&mut *tx).await?;
        let detail =
            json!({ "volume": name.as_str(), "id": id.to_string(), "reason": "requested" });
        let body = EventBody::new(EventKind::VolumeDeleted, detail);
        self.audit.commit(tx, &EventSubject::by(key, Some(tenant)), &body).await?;
        Ok(Ok(()))
    }
}

/// Reads a volume, also inside a transaction.
async fn get(
    executor: impl PgExecutor<'_>,
    tenant: &TenantId,
    name: &VolumeName,
) -> Result<Option<Volume>, Error> {
    let found = select_volumes!("tenant_id = $1 AND name = $2", tenant.as_str(), name.as_str());
    Ok(found.fetch_optional(executor).await?)
}
