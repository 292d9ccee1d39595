//! The lease columns of `sessions`, and the fate of runs whose lease ends.

use codelia_types::{
    Incarnation, LeaseEpoch, LeaseToken, LostReason, Outcome, SessionId, TenantId, WorkerId,
};
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use crate::{
    Error, HeldChanges, SessionSpec, Store,
    audit::{AuditLog, RunEnd, RunEnds},
    pools::read_in_order,
    row, run,
};

/// A worker's lease on a session.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The session that the worker holds.
    pub session: SessionId,
    /// The tenant of the session.
    pub tenant: TenantId,
    /// Identifies the lease in every write under it.
    pub token: LeaseToken,
    /// The spec that the session was created with.
    pub spec: SessionSpec,
    /// Whether the session's directory must exist: a run or a file call may have left files in it,
    /// and the caller did not allow their loss.
    pub has_files: bool,
    /// Changes of a run that wait for a decision.
    pub held: Option<HeldChanges>,
    /// Whether runs may be queued in the session.
    pub has_queue: bool,
    /// Runs of the previous holder that were queued again.
    pub retried: u64,
    /// Runs of the previous holder that ended as lost.
    pub lost: u64,
}

/// The result of ending the leases of dead workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Sessions whose lease was ended.
    pub sessions: u64,
    /// Started runs that were queued again, because their caller allowed retries.
    pub retried: u64,
    /// Started runs that ended as lost.
    pub lost: u64,
}

/// Sessions whose queued runs wait for a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WantedSessions {
    /// No live worker holds them. The first session of every tenant comes before the second of any.
    pub free: Vec<SessionId>,
    /// The worker holds them; the runs were queued without its knowledge. They are reported once.
    pub held: Vec<SessionId>,
}

/// The outcome of releasing a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseOutcome {
    /// The lease was released.
    Released,
    /// A run of the session is still running. The lease stays.
    Busy,
    /// The caller did not hold the lease.
    NotHeld,
}

/// Selects runs whose worker may be dead, by a condition and its arguments, with the end that they
/// have then.
macro_rules! running_runs {
    ($condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            "SELECT id, session_id, tenant_id, worker_id FROM live_runs WHERE " + $condition,
            $($argument),*
        )
        .try_map(|row| {
            let lost = Outcome::Lost(LostReason::WorkerLost);
            Ok(RunEnd::new(row.id, row.session_id, &row.tenant_id, row.worker_id.as_deref(), lost)?)
        })
    };
}

impl Store {
    /// Acquires the lease on an open session that no live worker holds, or that an earlier
    /// incarnation of this worker held. Its started runs end as lost or are queued again. Returns
    /// `None` if the worker may not take the session.
    pub async fn lease_acquire(
        &self,
        session: SessionId,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<Option<Lease>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let locked = sqlx::query!(
            "SELECT lease_worker, lease_incarnation FROM sessions WHERE id = $1 FOR UPDATE",
            session.0
        )
        .fetch_optional(&mut *tx)
        .await?;
        let holder = locked.map(|row| (row.lease_worker, row.lease_incarnation));
        if let Some((Some(holder), Some(incarnation))) = holder {
            mark_expired(&mut tx, &holder, incarnation).await?;
        }
        let acquired = sqlx::query_file!(
            "src/sql/lease_acquire.sql",
            session.0,
            worker.as_str(),
            incarnation.0
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(acquired) = acquired else { return Ok(None) };
        sqlx::query!("DELETE FROM waiting_sessions WHERE session_id = $1", session.0)
            .execute(&mut *tx)
            .await?;
        let mut has_files = false;
        let mut held = None;
        let mut retried = 0;
        let mut lost = 0;
        if acquired.lease_epoch > 1 {
            let orphans =
                running_runs!("session_id = $1 AND state = 'running' FOR UPDATE", session.0)
                    .fetch_all(&mut *tx)
                    .await?;
            (retried, lost) = resolve_orphan_runs(&self.audit, &mut tx, &orphans).await?;
            held = run::held_changes(&mut tx, session).await?;
            has_files = !acquired.allow_data_loss && may_have_files(&mut tx, session).await?;
        }
        tx.commit().await?;
        Ok(Some(Lease {
            session,
            tenant: row::parse("sessions.tenant_id", &acquired.tenant_id)?,
            token: LeaseToken {
                worker: worker.clone(),
                incarnation,
                epoch: LeaseEpoch(acquired.lease_epoch),
            },
            spec: acquired.spec.0,
            has_files,
            held,
            has_queue: true,
            retried,
            lost,
        }))
    }

    /// As [`Store::lease_acquire`], for a session that nobody has held before. Returns `None` also
    /// if somebody has.
    pub async fn lease_acquire_first(
        &self,
        session: SessionId,
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<Option<Lease>, Error> {
        let acquired = sqlx::query_file!(
            "src/sql/lease_acquire_first.sql",
            session.0,
            worker.as_str(),
            incarnation.0
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let Some(acquired) = acquired else { return Ok(None) };
        let epoch = LeaseEpoch(acquired.lease_epoch);
        let token = LeaseToken { worker: worker.clone(), incarnation, epoch };
        first_lease(session, &acquired.tenant_id, token, acquired.spec.0, acquired.has_queue)
            .map(Some)
    }

    /// Returns the first lease on an open session, if `lease` is that: for a worker that did not
    /// get the answer of its acquisition.
    pub async fn lease_get_first(
        &self,
        session: SessionId,
        lease: &LeaseToken,
    ) -> Result<Option<Lease>, Error> {
        let held = sqlx::query!(
            r#"SELECT tenant_id, spec AS "spec: Json<SessionSpec>" FROM sessions
               WHERE id = $1 AND lease_worker = $2 AND lease_incarnation = $3 AND lease_epoch = $4
                 AND lease_epoch = 1 AND state = 'open'"#,
            session.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        held.map(|row| first_lease(session, &row.tenant_id, lease.clone(), row.spec.0, true))
            .transpose()
    }

    /// Releases a lease unless a run of the session is running. The session is locked before its
    /// runs are checked, so that the check sees a run that is just being inserted for the holder.
    pub async fn lease_release(
        &self,
        session: SessionId,
        lease: &LeaseToken,
    ) -> Result<ReleaseOutcome, Error> {
        let mut tx = self.pools.runs.begin().await?;
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
             WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM live_runs WHERE session_id = $1 AND state = 'running')",
            session.0,
        )
        .execute(&mut *tx)
        .await?;
        let released = released.rows_affected() > 0;
        if released {
            mark_waiting(&mut tx, &[session.0]).await?;
        }
        tx.commit().await?;
        Ok(if released { ReleaseOutcome::Released } else { ReleaseOutcome::Busy })
    }

    /// Lists open sessions with queued runs that wait for this worker, or that it may take.
    pub async fn lease_list_wanted(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        limit: i64,
    ) -> Result<WantedSessions, Error> {
        let found = sqlx::query_file!(
            "src/sql/lease_list_wanted.sql",
            worker.as_str(),
            incarnation.0,
            limit
        )
        .fetch_all(&self.pools.runs)
        .await?;
        let outdated: Vec<Uuid> = found.iter().filter(|row| !row.waits).map(|row| row.id).collect();
        if !outdated.is_empty() {
            self.clear_outdated(&outdated, worker, incarnation).await?;
        }
        let limit = usize::try_from(limit).unwrap_or(0);
        let waiting = found.iter().filter(|row| row.waits).take(limit);
        let held = found.iter().filter(|row| row.held);
        Ok(WantedSessions {
            free: waiting.map(|row| SessionId(row.id)).collect(),
            held: held.map(|row| SessionId(row.id)).collect(),
        })
    }

    /// Deletes rows of sessions that do not wait for a worker, and of those that this worker holds:
    /// it knows now. A session that is locked may be about to wait again; it is left to a later
    /// call.
    async fn clear_outdated(
        &self,
        sessions: &[Uuid],
        worker: &WorkerId,
        incarnation: Incarnation,
    ) -> Result<(), Error> {
        let mut tx = self.pools.runs.begin().await?;
        let locked = sqlx::query_scalar!(
            "SELECT id FROM sessions WHERE id = ANY ($1) ORDER BY id FOR UPDATE SKIP LOCKED",
            sessions
        )
        .fetch_all(&mut *tx)
        .await?;
        sqlx::query!(
            "DELETE FROM waiting_sessions w USING sessions s
             WHERE w.session_id = ANY ($1) AND s.id = w.session_id AND s.id = ANY ($1)
               AND (s.state <> 'open' OR s.expires_at <= now()
                    OR EXISTS (SELECT 1 FROM workers holder
                               WHERE holder.id = s.lease_worker AND holder.incarnation = s.lease_incarnation
                                 AND holder.lease_until > now() AND holder.id = $2 AND holder.incarnation = $3)
                    OR (SELECT r.id FROM live_runs r WHERE r.session_id = s.id AND r.state = 'queued' LIMIT 1) IS NULL)",
            &locked,
            worker.as_str(),
            incarnation.0,
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Ends the leases of dead workers. Started runs end as lost, or are queued again if their
    /// caller allowed retries. Idempotent. Any api or worker may call it.
    pub async fn lease_sweep_any_tenant(&self, limit: i64) -> Result<SweepReport, Error> {
        let mut tx = self.pools.upkeep.begin().await?;
        mark_all_expired(&mut tx).await?;
        let sessions = end_dead_leases(&mut tx, limit).await?;
        let orphans = lock_orphans(&mut tx, limit).await?;
        let (retried, lost) = resolve_orphan_runs(&self.audit, &mut tx, &orphans).await?;
        offer_lost_roots(&mut tx, limit).await?;
        tx.commit().await?;
        Ok(SweepReport { sessions, retried, lost })
    }
}

/// The lease on a session that nobody has held before, so that there is nothing of an earlier
/// holder.
fn first_lease(
    session: SessionId,
    tenant: &str,
    token: LeaseToken,
    spec: SessionSpec,
    has_queue: bool,
) -> Result<Lease, Error> {
    Ok(Lease {
        session,
        tenant: row::parse("sessions.tenant_id", tenant)?,
        token,
        spec,
        has_files: false,
        held: None,
        has_queue,
        retried: 0,
        lost: 0,
    })
}

/// Whether a command may have been started in the session, or a file call made. What ended before
/// the last check of the session is in `used_at`, see `session_check.sql`.
async fn may_have_files(tx: &mut PgConnection, session: SessionId) -> Result<bool, Error> {
    read_in_order(tx).await?;
    let found = sqlx::query_file_scalar!("src/sql/session_may_have_files.sql", session.0,)
        .fetch_one(tx)
        .await?;
    Ok(found)
}

/// Marks an expired holder, so that a renewal in flight cannot revive it after its session was
/// taken. The update waits for a renewal that came first. A renewal that comes later finds
/// `lease_until` far in the past, whatever the value of `now()` in its transaction.
async fn mark_expired(tx: &mut PgConnection, holder: &str, incarnation: Uuid) -> Result<(), Error> {
    sqlx::query!(
        "UPDATE workers SET lease_until = 'epoch'
         WHERE id = $1 AND incarnation = $2 AND lease_until <= now() AND lease_until > 'epoch'",
        holder,
        incarnation,
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Does the same for every expired worker. Rows are locked in id order, so that concurrent sweeps
/// do not deadlock.
async fn mark_all_expired(tx: &mut PgConnection) -> Result<(), Error> {
    sqlx::query!(
        "WITH expired AS (
             SELECT id FROM workers WHERE lease_until <= now() AND lease_until > 'epoch' ORDER BY id FOR UPDATE
         )
         UPDATE workers w SET lease_until = 'epoch' FROM expired WHERE w.id = expired.id",
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Ends leases whose worker is dead. The first two statements find and lock the rows, and the third
/// repeats the condition: a statement that waited for a row lock re-reads that row, but not the
/// rows of other tables, which may have changed meanwhile.
async fn end_dead_leases(tx: &mut PgConnection, limit: i64) -> Result<u64, Error> {
    let found =
        sqlx::query_file_scalar!("src/sql/dead_leases_find.sql", limit).fetch_all(&mut *tx).await?;
    if found.is_empty() {
        return Ok(0);
    }
    let locked = sqlx::query_scalar!(
        "SELECT id FROM sessions WHERE id = ANY ($1) ORDER BY id FOR UPDATE SKIP LOCKED",
        &found
    )
    .fetch_all(&mut *tx)
    .await?;
    let released = sqlx::query!(
        "UPDATE sessions s SET lease_worker = NULL, lease_incarnation = NULL
         WHERE s.id = ANY ($1) AND s.lease_worker IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM workers w
                           WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                             AND w.lease_until > now())",
        &locked,
    )
    .execute(&mut *tx)
    .await?;
    mark_waiting(tx, &locked).await?;
    Ok(released.rows_affected())
}

/// Makes workers find these sessions, which the caller has locked, if they have queued runs and no
/// holder.
async fn mark_waiting(tx: &mut PgConnection, sessions: &[Uuid]) -> Result<(), Error> {
    sqlx::query!(
        "INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
         SELECT s.id, s.tenant_id, s.spec ->> 'mode', coalesce(s.home_root, '00000000-0000-0000-0000-000000000000'),
                s.allow_data_loss
         FROM sessions s
         -- That it has not ended, and not that it is open: the planner may combine indexes of open sessions.
         WHERE s.id = ANY ($1) AND s.lease_worker IS NULL AND s.ended_at IS NULL
           -- Not EXISTS, which the planner may turn into a read of the whole queue.
           AND (SELECT r.id FROM live_runs r WHERE r.session_id = s.id AND r.state = 'queued' LIMIT 1) IS NOT NULL
         ON CONFLICT (session_id) DO UPDATE SET root = excluded.root",
        sessions,
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Lets every worker find waiting sessions whose files are gone and whose caller allowed the loss.
/// Reads one row for each root.
async fn offer_lost_roots(tx: &mut PgConnection, limit: i64) -> Result<(), Error> {
    sqlx::query_file!("src/sql/waiting_lost_roots.sql", limit).execute(tx).await?;
    Ok(())
}

/// Locks runs whose worker is dead, with their sessions: a session that ends or is released at the
/// same time must see the runs that are queued again. Skips locked rows: another transaction is
/// committing or resolving them.
async fn lock_orphans(tx: &mut PgConnection, limit: i64) -> Result<Vec<RunEnd>, Error> {
    let found =
        sqlx::query_file!("src/sql/orphan_runs_find.sql", limit).fetch_all(&mut *tx).await?;
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let (runs, sessions): (Vec<Uuid>, Vec<Uuid>) =
        found.into_iter().map(|row| (row.id, row.session_id)).unzip();
    let sessions = sqlx::query_scalar!(
        "SELECT id FROM sessions WHERE id = ANY ($1) ORDER BY id FOR SHARE SKIP LOCKED",
        &sessions
    )
    .fetch_all(&mut *tx)
    .await?;
    let locked = running_runs!(
        "id = ANY ($1) AND session_id = ANY ($2) AND state = 'running' FOR UPDATE SKIP LOCKED",
        &runs,
        &sessions,
    );
    Ok(locked.fetch_all(tx).await?)
}

/// Ends or requeues those of the runs whose worker is dead. The caller has locked their sessions.
/// Returns how many were retried and lost.
async fn resolve_orphan_runs(
    log: &AuditLog,
    tx: &mut PgConnection,
    orphans: &[RunEnd],
) -> Result<(u64, u64), Error> {
    if orphans.is_empty() {
        return Ok((0, 0));
    }
    let RunEnds { runs, events, .. } = log.run_ends(orphans);
    let row = sqlx::query_file!(
        "src/sql/orphan_runs_resolve.sql",
        &runs,
        events.writer,
        &events.ids,
        &events.times,
        &events.details,
        &events.macs as _,
    )
    .fetch_one(tx)
    .await?;
    Ok((row.retried.unsigned_abs(), row.lost.unsigned_abs()))
}
