//! The table `volume_mounts`: which sessions mount which volumes.

use codelia_policy::VolumeMount;
use codelia_types::{SessionId, TenantId, VolumeId};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{Error, Store, row};

/// The volumes that a session is to mount.
#[derive(Debug, Clone, Copy)]
pub struct SessionVolumes<'a> {
    /// The tenant of the session.
    pub tenant: &'a TenantId,
    /// The session that is to mount them.
    pub session: SessionId,
    /// The project of the session.
    pub project: Option<&'a str>,
    /// The volumes.
    pub volumes: &'a [VolumeMount],
}

/// The answer to [`Store::volume_mount`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VolumesMounted {
    /// The session mounts all of them.
    Mounted,
    /// The tenant has no volume with this name.
    NotFound(String),
    /// The volume is only for sessions of a project.
    OtherProject {
        /// The volume.
        name: String,
        /// The project that it is for.
        project: String,
    },
    /// Another session writes to the volume.
    InUse {
        /// The volume.
        name: String,
        /// That session.
        session: SessionId,
        /// Whether it is open. If it has ended, its files are about to be removed.
        is_open: bool,
    },
    /// Volumes are on the disks of different workers.
    Apart(String, String),
}

/// A volume that a session mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// Names the directory of the volume.
    pub id: VolumeId,
    /// The name by which the session asked for it.
    pub name: String,
    /// Whether the session writes to it.
    pub is_writer: bool,
    /// Maximum size of its files in bytes.
    pub max_bytes: u64,
    /// Size of its files in bytes, when it was last measured.
    pub used_bytes: u64,
}

struct LockedVolume {
    id: Uuid,
    name: String,
    project: Option<String>,
    /// The root that has its directory, unless that is gone.
    root_id: Option<Uuid>,
}

impl Store {
    /// Records the volumes that a new session mounts. If one has a directory, only workers with its
    /// root may take the session. Repeating it changes nothing.
    pub async fn volume_mount(&self, wanted: SessionVolumes<'_>) -> Result<VolumesMounted, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let locked = lock(&mut tx, wanted).await?;
        if let Some(refused) = first_refused(&mut tx, wanted, &locked).await? {
            return Ok(refused);
        }
        let ids: Vec<_> = locked.iter().map(|volume| volume.id).collect();
        let mode_of = |volume: &LockedVolume| {
            let wanted = wanted.volumes.iter().find(|wanted| wanted.name == volume.name);
            wanted.map(|wanted| wanted.mode.as_str().to_owned()).unwrap_or_default()
        };
        let modes: Vec<_> = locked.iter().map(mode_of).collect();
        sqlx::query!(
            "INSERT INTO volume_mounts (volume_id, session_id, mode)
             SELECT v.id, s.id, v.mode FROM unnest($1::uuid[], $2::text[]) AS v (id, mode), sessions s
             WHERE s.id = $3 AND s.tenant_id = $4 AND s.state = 'open'
             ON CONFLICT DO NOTHING",
            &ids,
            &modes,
            wanted.session.0,
            wanted.tenant.as_str(),
        )
        .execute(&mut *tx)
        .await?;
        sqlx::query!("UPDATE volumes SET used_at = now() WHERE id = ANY ($1)", &ids)
            .execute(&mut *tx)
            .await?;
        if let Some(root) = locked.iter().find_map(|volume| volume.root_id) {
            sqlx::query!(
                "UPDATE sessions SET home_root = $2
                 WHERE id = $1 AND state = 'open' AND lease_epoch = 0 AND home_root IS NULL",
                wanted.session.0,
                root,
            )
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        Ok(VolumesMounted::Mounted)
    }

    /// Returns the volumes that a session mounts and whose directories are, or will be, on this
    /// root. They count as used. For workers.
    pub async fn volume_use(
        &self,
        session: SessionId,
        root_id: Uuid,
    ) -> Result<Vec<MountedVolume>, Error> {
        let used = sqlx::query!(
            r#"UPDATE volumes v
               SET used_at = now(), root_id = $2, used_bytes = CASE WHEN v.root_id = $2 THEN v.used_bytes ELSE 0 END
               FROM volume_mounts m
               WHERE m.session_id = $1 AND v.id = m.volume_id
                 AND (v.root_id IS NULL OR v.root_id = $2 OR root_is_gone(v.root_id))
               RETURNING v.id, v.name, v.max_bytes, v.used_bytes, m.mode = 'exclusive' AS "is_writer!""#,
            session.0,
            root_id,
        )
        .map(|row| MountedVolume {
            id: VolumeId(row.id),
            name: row.name,
            is_writer: row.is_writer,
            max_bytes: row.max_bytes.unsigned_abs(),
            used_bytes: row.used_bytes.unsigned_abs(),
        });
        Ok(used.fetch_all(&self.pools.runs).await?)
    }

    /// Records the size of a volume on a root. For workers.
    pub async fn volume_measured(
        &self,
        id: VolumeId,
        root_id: Uuid,
        bytes: u64,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE volumes SET used_bytes = $3, used_at = now() WHERE id = $1 AND root_id = $2",
            id.0,
            root_id,
            row::bigint(bytes),
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(())
    }

    /// Filters `ids` for volumes that do not exist or have their directory on another root. For
    /// workers.
    pub async fn volume_list_orphans(
        &self,
        root_id: Uuid,
        ids: &[VolumeId],
    ) -> Result<Vec<VolumeId>, Error> {
        let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        let orphans = sqlx::query_scalar!(
            r#"SELECT found.id AS "id!" FROM unnest($1::uuid[]) AS found (id)
               WHERE NOT EXISTS (SELECT 1 FROM volumes v WHERE v.id = found.id AND v.root_id = $2)"#,
            &ids,
            root_id,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(orphans.into_iter().map(VolumeId).collect())
    }
}

/// Locks the volumes in one order, so that no two calls wait for each other.
async fn lock(
    tx: &mut PgConnection,
    wanted: SessionVolumes<'_>,
) -> Result<Vec<LockedVolume>, Error> {
    let names: Vec<_> = wanted.volumes.iter().map(|volume| volume.name.clone()).collect();
    let locked = sqlx::query_as!(
        LockedVolume,
        "SELECT id, name, project, CASE WHEN NOT root_is_gone(root_id) THEN root_id END AS root_id
         FROM volumes WHERE tenant_id = $1 AND name = ANY ($2) ORDER BY id FOR UPDATE",
        wanted.tenant.as_str(),
        &names,
    );
    Ok(locked.fetch_all(tx).await?)
}

async fn first_refused(
    tx: &mut PgConnection,
    wanted: SessionVolumes<'_>,
    locked: &[LockedVolume],
) -> Result<Option<VolumesMounted>, Error> {
    let mut placed: Option<&LockedVolume> = None;
    for mount in wanted.volumes {
        let Some(volume) = locked.iter().find(|volume| volume.name == mount.name) else {
            return Ok(Some(VolumesMounted::NotFound(mount.name.clone())));
        };
        if let Some(project) = &volume.project
            && wanted.project != Some(project)
        {
            return Ok(Some(VolumesMounted::OtherProject {
                name: volume.name.clone(),
                project: project.clone(),
            }));
        }
        match (placed, volume.root_id) {
            (Some(other), Some(root)) if other.root_id != Some(root) => {
                return Ok(Some(VolumesMounted::Apart(other.name.clone(), volume.name.clone())));
            }
            (None, Some(_)) => placed = Some(volume),
            _ => {}
        }
        if mount.mode == codelia_policy::VolumeMode::Exclusive
            && let Some((session, is_open)) = writer(tx, volume.id, wanted.session).await?
        {
            let name = volume.name.clone();
            return Ok(Some(VolumesMounted::InUse { name, session, is_open }));
        }
    }
    Ok(None)
}

/// Another session that writes to a volume.
async fn writer(
    tx: &mut PgConnection,
    volume: Uuid,
    session: SessionId,
) -> Result<Option<(SessionId, bool)>, Error> {
    let found = sqlx::query!(
        r#"SELECT s.id, s.state = 'open' AS "is_open!" FROM volume_mounts m JOIN sessions s ON s.id = m.session_id
           WHERE m.volume_id = $1 AND m.mode = 'exclusive' AND s.removed_at IS NULL AND s.id <> $2
           ORDER BY s.state = 'open' DESC LIMIT 1"#,
        volume,
        session.0,
    )
    .fetch_optional(tx)
    .await?;
    Ok(found.map(|row| (SessionId(row.id), row.is_open)))
}
