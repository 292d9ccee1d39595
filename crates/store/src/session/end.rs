//! Ending sessions and removing their files.

use std::collections::BTreeMap;

use codelia_policy::NetworkPolicy;
use codelia_types::{
    Incarnation, LeaseToken, Outcome, Reason, Refusal, SessionId, TenantId, WorkerId,
};
use sqlx::types::Json;
use uuid::Uuid;

use super::record::{Session, SessionRef, SessionSpec, session};
use crate::{Error, Store, run};

impl Store {
    /// Closes a session and cancels its queued runs. An ended session stays as it is.
    pub async fn session_close(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = session.columns();
        let canceled = Json(Outcome::Canceled);
        let closed = sqlx::query_file!(
            "src/sql/session_close.sql",
            tenant.as_str(),
            id,
            alias,
            canceled as _
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let Some(closed) = closed else { return Ok(None) };
        if closed.has_queue {
            self.run_end_queue(SessionId(closed.id)).await?;
        }
        Ok(Some(session!(closed)))
    }

    /// Ends a session whose files its holder cannot find, and refuses its queued runs.
    pub async fn session_end_data_lost(
        &self,
        id: SessionId,
        lease: &LeaseToken,
    ) -> Result<(), Error> {
        let refused = Outcome::Refused(Refusal {
            reason: Reason::SessionDataLost,
            message: "the session's files are lost".into(),
        });
        let mut tx = self.pools.runs.begin().await?;
        let ended = sqlx::query!(
            "UPDATE sessions SET state = 'ended', end_reason = 'data_lost', ended_at = now()
             WHERE id = $1 AND state = 'open' AND lease_worker = $2 AND lease_incarnation = $3 AND lease_epoch = $4",
            id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
        )
        .execute(&mut *tx)
        .await?;
        let has_queue =
            ended.rows_affected() > 0 && run::begin_queue_end(&mut tx, id, &refused).await?;
        tx.commit().await?;
        if has_queue {
            self.run_end_queue(id).await?;
        }
        Ok(())
    }

    /// Looks at open sessions that are due, at most `limit`. Ends those that are past their expiry
    /// or idle time and have no unfinished run, and expired ones whose runs no worker can take, and
    /// returns how many. [`Store::run_end_queues_any_tenant`] ends these runs. The first statement
    /// locks the rows, so that the second sees every run that was inserted before.
    pub async fn session_expire_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let mut tx = self.pools.upkeep.begin_in_order().await?;
        let due = sqlx::query_scalar!(
            "SELECT id FROM sessions WHERE state = 'open' AND check_at <= now()
             ORDER BY check_at LIMIT $1 FOR UPDATE SKIP LOCKED",
            limit,
        )
        .fetch_all(&mut *tx)
        .await?;
        if due.is_empty() {
            return Ok(0);
        }
        let refused = Outcome::Refused(Refusal {
            reason: Reason::SessionEnded,
            message: "the session expired before a worker took the run; create another session"
                .into(),
        });
        let ended = sqlx::query_file_scalar!("src/sql/session_check.sql", &due, Json(refused) as _)
            .fetch_one(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(ended.unsigned_abs())
    }

    /// Makes sessions due, at most `limit`, that were found expired while the clock was ahead and
    /// that would be looked at long after their expiry now. Returns how many.
    pub async fn session_check_again_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let changed = sqlx::query!(
            "UPDATE sessions SET check_at = now() WHERE id IN (
                 SELECT id FROM sessions
                 WHERE state = 'open' AND check_at > greatest(expires_at, now()) + interval '2 seconds'
                 LIMIT $1 FOR UPDATE SKIP LOCKED)",
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(changed.rows_affected())
    }

    /// Lists ended sessions whose files are on this root and that no other live worker holds.
    pub async fn session_list_removable(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        root_id: Uuid,
        limit: i64,
    ) -> Result<Vec<SessionId>, Error> {
        let ids = sqlx::query_scalar!(
            "SELECT s.id FROM sessions s
             WHERE s.state = 'ended' AND s.removed_at IS NULL AND s.home_root = $3
               AND ((s.lease_worker = $1 AND s.lease_incarnation = $2)
                    OR NOT EXISTS (SELECT 1 FROM workers w
                                   WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                                     AND w.lease_until > now()))
             ORDER BY s.ended_at LIMIT $4",
            worker.as_str(),
            incarnation.0,
            root_id,
            limit,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(ids.into_iter().map(SessionId).collect())
    }

    /// Records that the directories of ended sessions are removed, with the changes that they held,
    /// and ends their leases. Leaves out sessions in which a run is still running.
    pub async fn session_mark_removed(
        &self,
        ids: &[SessionId],
        root_id: Uuid,
    ) -> Result<(), Error> {
        let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        sqlx::query_file!("src/sql/session_mark_removed.sql", &ids, root_id,)
            .execute(&self.pools.upkeep)
            .await?;
        Ok(())
    }

    /// Filters `ids` for sessions that are unknown, removed, or have their files on another root.
    /// Directories of these sessions on this root can be deleted.
    pub async fn session_list_orphans(
        &self,
        root_id: Uuid,
        ids: &[SessionId],
    ) -> Result<Vec<SessionId>, Error> {
        let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        let orphans = sqlx::query_scalar!(
            r#"SELECT found.id AS "id!" FROM unnest($2::uuid[]) AS found (id)
               LEFT JOIN sessions s ON s.id = found.id
               -- An ended session that is not removed yet is no orphan: session_list_removable lists it.
               WHERE s.id IS NULL OR s.removed_at IS NOT NULL OR s.home_root IS DISTINCT FROM $1"#,
            root_id,
            &ids,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        Ok(orphans.into_iter().map(SessionId).collect())
    }
}
