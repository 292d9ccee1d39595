//! The lease columns of `sessions`, and what happens to runs when a lease changes hands.

use codelia_types::{Incarnation, LeaseEpoch, LeaseToken, SessionId, TenantId, WorkerId};

use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use crate::{Error, SessionSpec, Store, row};

/// A worker's right to a session.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// Proves the lease in every write under it.
    pub token: LeaseToken,
    /// What the session was created with.
    pub spec: SessionSpec,
    /// Whether its directory must be there: a run or a file call may have left files in it, and its caller did not
    /// allow that they are lost.
    pub has_files: bool,
}

/// What became of leases whose worker is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Sessions that nobody holds now.
    pub sessions: u64,
    /// Started runs that are queued again, because their caller allowed it.
    pub retried: u64,
    /// Started runs that ended as lost.
    pub lost: u64,
}

/// What became of a lease that was to be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// It is.
    Released,
    /// A run of the session has not ended.
    Busy,
    /// It was not the caller's any more.
    NotHeld,
}

impl Store {
    /// Takes an open session that nobody live holds, or that an earlier incarnation of this
    /// worker held; its started runs become lost or queued again. `None` if it may not be taken.
    pub async fn lease_acquire(
        &self,
        session: SessionId,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<Option<Lease>, Error> {
        let mut tx = self.pool.begin().await?;
        let locked = sqlx::query!(
            "SELECT lease_worker, lease_incarnation FROM sessions WHERE id = $1 FOR UPDATE",
            session.0
        )
        .fetch_optional(&mut *tx)
        .await?;
        if let Some((Some(holder), Some(life))) = locked.map(|row| (row.lease_worker, row.lease_incarnation))
        {
            mark_gone(&mut tx, &holder, life).await?;
        }
        let taken = sqlx::query_file!("src/sql/lease_acquire.sql", session.0, worker.as_str(), incarnation.0)
            .fetch_optional(&mut *tx)
            .await?;
        let Some(taken) = taken else { return Ok(None) };
        let has_files = if taken.lease_epoch > 1 {
            resolve_orphan_runs(&mut tx, Some(session), i64::MAX).await?;
            !taken.allow_data_loss && has_files(&mut tx, session).await?
        } else {
            false
        };
        tx.commit().await?;
        Ok(Some(Lease {
            session,
            tenant: row::parse("sessions.tenant_id", &taken.tenant_id)?,
            token: LeaseToken { worker: worker.clone(), incarnation, epoch: LeaseEpoch(taken.lease_epoch) },
            spec: taken.spec.0,
            has_files,
        }))
    }

    /// Gives a session back, if none of its runs is running. It is locked first, and then asked about: a run
    /// that is being recorded for its holder is waited for.
    pub async fn lease_release(
        &self,
        session: SessionId,
        lease: &LeaseToken,
    ) -> Result<ReleaseOutcome, Error> {
        let mut tx = self.pool.begin().await?;
        let held = sqlx::query_scalar!(
            "SELECT id FROM sessions
             WHERE id = $1 AND lease_worker = $2 AND lease_incarnation = $3 AND lease_epoch = $4 FOR UPDATE",
            session.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
        )
        .fetch_optional(&mut *tx)
        .await?;
        if held.is_none() {
            return Ok(ReleaseOutcome::NotHeld);
        }
        let released = sqlx::query!(
            "UPDATE sessions SET lease_worker = NULL, lease_incarnation = NULL
             WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM runs WHERE session_id = $1 AND state = 'running')",
            session.0,
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(if released.rows_affected() > 0 { ReleaseOutcome::Released } else { ReleaseOutcome::Busy })
    }

    /// Open sessions with queued runs that nobody live holds and this worker may take: fairly,
    /// at most one for each tenant first.
    pub async fn lease_list_wanted(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        limit: i64,
    ) -> Result<Vec<SessionId>, Error> {
        let ids =
            sqlx::query_file_scalar!("src/sql/lease_list_wanted.sql", worker.as_str(), incarnation.0, limit)
                .fetch_all(&self.pool)
                .await?;
        Ok(ids.into_iter().map(SessionId).collect())
    }

    /// Ends the leases of workers that are gone: started runs become lost, or queued again if
    /// their caller allowed retries. Idempotent; any api or worker may call it.
    pub async fn lease_sweep_any_tenant(&self, limit: i64) -> Result<SweepReport, Error> {
        let mut tx = self.pool.begin().await?;
        mark_all_gone(&mut tx).await?;
        let sessions = release_dead_leases(&mut tx, limit).await?;
        let (retried, lost) = resolve_orphan_runs(&mut tx, None, limit).await?;
        tx.commit().await?;
        self.run_cancel_stranded_any_tenant(limit).await?;
        Ok(SweepReport { sessions, retried, lost })
    }
}

/// Whether any command may have been started in a session, or a file call made.
async fn has_files(tx: &mut PgConnection, session: SessionId) -> Result<bool, Error> {
    let found = sqlx::query_scalar!(
        r#"SELECT EXISTS (SELECT 1 FROM runs
                          WHERE session_id = $1
                            AND (started_at IS NOT NULL OR attempt > 1 OR outcome ->> 'kind' = 'lost'))
               OR EXISTS (SELECT 1 FROM sessions WHERE id = $1 AND used_at IS NOT NULL) AS "found!""#,
        session.0,
    )
    .fetch_one(tx)
    .await?;
    Ok(found)
}

/// Marks a holder whose lease has run out, so that a renewal that is on its way cannot revive it once its
/// session is taken: one that came first is waited for,
/// one that comes later finds a time long past, whatever time it believes it is.
async fn mark_gone(tx: &mut PgConnection, holder: &str, life: Uuid) -> Result<(), Error> {
    sqlx::query!(
        "UPDATE workers SET lease_until = 'epoch'
         WHERE id = $1 AND incarnation = $2 AND lease_until <= now() AND lease_until > 'epoch'",
        holder,
        life,
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// The same for every worker; in one order, so that those who do it at once wait in line.
async fn mark_all_gone(tx: &mut PgConnection) -> Result<(), Error> {
    sqlx::query!(
        "WITH gone AS (
             SELECT id FROM workers WHERE lease_until <= now() AND lease_until > 'epoch' ORDER BY id FOR UPDATE
         )
         UPDATE workers w SET lease_until = 'epoch' FROM gone WHERE w.id = gone.id",
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Ends leases whose worker is gone. Locks first and asks again under the lock: a statement that
/// finds a row changed goes on with what it saw of other tables, which may be out of date.
async fn release_dead_leases(tx: &mut PgConnection, limit: i64) -> Result<u64, Error> {
    let locked = sqlx::query_scalar!(
        "SELECT s.id FROM sessions s
         WHERE s.lease_worker IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM workers w
                           WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                             AND w.lease_until > now())
         LIMIT $1 FOR UPDATE OF s SKIP LOCKED",
        limit,
    )
    .fetch_all(&mut *tx)
    .await?;
    if locked.is_empty() {
        return Ok(0);
    }
    let released = sqlx::query!(
        "UPDATE sessions s SET lease_worker = NULL, lease_incarnation = NULL
         WHERE s.id = ANY ($1) AND s.lease_worker IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM workers w
                           WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                             AND w.lease_until > now())",
        &locked,
    )
    .execute(tx)
    .await?;
    Ok(released.rows_affected())
}

/// Ends or queues runs whose worker is gone; in the same two steps, for the same reason. A row
/// that somebody else has locked is being committed, or resolved already.
async fn resolve_orphan_runs(
    tx: &mut PgConnection,
    session: Option<SessionId>,
    limit: i64,
) -> Result<(u64, u64), Error> {
    let locked = sqlx::query_scalar!(
        "SELECT r.id FROM runs r
         WHERE r.state = 'running' AND ($1::uuid IS NULL OR r.session_id = $1)
           AND NOT EXISTS (SELECT 1 FROM workers w
                           WHERE w.id = r.worker_id AND w.incarnation = r.incarnation AND w.lease_until > now())
         LIMIT $2 FOR UPDATE OF r SKIP LOCKED",
        session.map(|id| id.0),
        limit,
    )
    .fetch_all(&mut *tx)
    .await?;
    if locked.is_empty() {
        return Ok((0, 0));
    }
    let row = sqlx::query_file!("src/sql/orphan_runs_resolve.sql", &locked).fetch_one(tx).await?;
    Ok((row.retried.unsigned_abs(), row.lost.unsigned_abs()))
}
