//! Queued runs: why they wait, and the end of those that waited too long.

use std::fmt;

use codelia_types::{Mode, Outcome, Reason, Refusal, RunId, SessionId, duration};
use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use crate::{
    Error, Store,
    audit::{AuditLog, RunEnd, RunEnds},
    pools::Pool,
    row,
};

/// Queued runs that one transaction ends.
const MAX_ENDED: i64 = 500;

/// Why no worker has taken a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// No worker is alive.
    NoWorker,
    /// No live worker has the mode of the session.
    NoMode(Mode),
    /// No live worker has the session's files.
    NoFiles,
    /// All workers that could take it have less disk space than they keep free.
    NoSpace,
    /// All workers that could take it are draining.
    Draining,
    /// All workers that could take it are busy.
    Busy,
    /// A worker is about to take it.
    Starting,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWorker => f.write_str("none ready: no worker is running"),
            Self::NoMode(mode) => write!(f, "none ready: no worker has mode {mode}"),
            Self::NoFiles => f.write_str("none ready: no worker has the session's files"),
            Self::NoSpace => {
                f.write_str("none ready: no worker has disk space (worker.disk_reserve)")
            }
            Self::Draining => f.write_str("none ready: all workers are draining"),
            Self::Busy => f.write_str("none ready: all workers are busy"),
            Self::Starting => f.write_str("one is about to take the run"),
        }
    }
}

/// A run that waits.
struct WaitingRun {
    run: Uuid,
    session: Uuid,
    tenant: String,
    mode: String,
    queue_timeout: Option<sqlx::postgres::types::PgInterval>,
    live: i64,
    with_mode: i64,
    with_files: i64,
    with_space: i64,
    ready: i64,
    free: i64,
}

impl WaitingRun {
    fn reason(&self) -> Result<WaitReason, Error> {
        Ok(match self {
            Self { live: 0, .. } => WaitReason::NoWorker,
            Self { with_mode: 0, .. } => {
                WaitReason::NoMode(row::parse("sessions.spec", &self.mode)?)
            }
            Self { with_files: 0, .. } => WaitReason::NoFiles,
            Self { with_space: 0, .. } => WaitReason::NoSpace,
            Self { ready: 0, .. } => WaitReason::Draining,
            Self { free: 0, .. } => WaitReason::Busy,
            _ => WaitReason::Starting,
        })
    }

    /// The outcome of the run if its queue timeout has passed.
    fn outcome(&self) -> Result<Outcome, Error> {
        let waited = self.queue_timeout.as_ref().map(row::duration).unwrap_or_default();
        let message = format!(
            "no worker took the run in {} ({}); start workers, or allow a longer queue timeout",
            duration::text(waited),
            self.reason()?
        );
        Ok(Outcome::Refused(Refusal { reason: Reason::QueueTimeout, message }))
    }
}

impl Store {
    /// Why no worker has taken a run. `None` if the run does not exist.
    pub async fn run_wait_reason(&self, id: RunId) -> Result<Option<WaitReason>, Error> {
        self.run_waiting(&[id.0]).await?.first().map(WaitingRun::reason).transpose()
    }

    /// Ends queued runs whose queue timeout has passed, at most `limit`, and returns how many.
    pub async fn run_expire_queued_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let due = sqlx::query_scalar!(
            "SELECT id FROM live_runs WHERE state = 'queued' AND queued_until <= now() ORDER BY queued_until LIMIT $1",
            limit,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        if due.is_empty() {
            return Ok(0);
        }
        let waiting = self.run_waiting(&due).await?;
        let ending = waiting
            .into_iter()
            .map(|run| RunEnd::new(run.run, run.session, &run.tenant, None, run.outcome()?))
            .collect::<Result<Vec<_>, Error>>()?;
        let RunEnds { runs, outcomes, events } = self.audit.run_ends(&ending);
        let ended = sqlx::query_file!(
            "src/sql/queue_expire.sql",
            &runs,
            &outcomes as _,
            events.writer,
            &events.ids,
            &events.times,
            &events.details,
            &events.macs as _,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(ended.rows_affected())
    }

    /// Ends queued and held runs of sessions that have ended, at most `limit`, and returns how
    /// many.
    pub async fn run_end_queues_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let sessions =
            sqlx::query_scalar!("SELECT session_id FROM ending_sessions LIMIT $1", limit)
                .fetch_all(&self.pools.upkeep)
                .await?;
        if sessions.is_empty() {
            return Ok(0);
        }
        Ok(end_queues(&self.audit, &self.pools.upkeep, &sessions, limit).await?.0)
    }

    /// Ends all queued and held runs of a session that has ended. If this fails, the upkeep
    /// continues.
    pub(crate) async fn run_end_queue(&self, session: SessionId) -> Result<(), Error> {
        while end_queues(&self.audit, &self.pools.runs, &[session.0], MAX_ENDED).await?.1 {}
        Ok(())
    }

    async fn run_waiting(&self, ids: &[Uuid]) -> Result<Vec<WaitingRun>, Error> {
        Ok(sqlx::query_file_as!(WaitingRun, "src/sql/run_wait_reason.sql", ids)
            .fetch_all(&self.pools.reads)
            .await?)
    }
}

/// Ends queued and held runs of sessions that have ended. Returns how many, and whether some are
/// left.
async fn end_queues(
    log: &AuditLog,
    pool: &Pool,
    sessions: &[Uuid],
    limit: i64,
) -> Result<(u64, bool), Error> {
    let ending = sqlx::query_file!("src/sql/queue_end_find.sql", sessions, limit)
        .try_map(|row| Ok(RunEnd::new(row.run, row.session, &row.tenant, None, row.outcome.0)?))
        .fetch_all(pool)
        .await?;
    let RunEnds { runs, outcomes, events } = log.run_ends(&ending);
    let ended = sqlx::query_file!(
        "src/sql/queue_end.sql",
        &runs,
        &outcomes as _,
        events.writer,
        &events.ids,
        &events.times,
        &events.details,
        &events.macs as _,
    )
    .execute(pool)
    .await?;
    let is_left = sqlx::query_scalar!(
        r#"WITH done AS (
               DELETE FROM ending_sessions e
               WHERE e.session_id = ANY ($1)
                 AND (SELECT r.id FROM live_runs r WHERE r.session_id = e.session_id AND r.state IN ('held', 'queued') LIMIT 1) IS NULL
               RETURNING e.session_id
           )
           SELECT EXISTS (SELECT 1 FROM ending_sessions WHERE session_id = ANY ($1) AND session_id NOT IN (SELECT session_id FROM done))
               AS "is_left!""#,
        sessions,
    )
    .fetch_one(pool)
    .await?;
    Ok((ended.rows_affected(), is_left))
}

/// Records that the queued and held runs of a session end, which the same transaction has ended
/// before, in a statement that sees every run that was inserted until then. Returns whether there
/// are some.
pub(crate) async fn begin_queue_end(
    tx: &mut PgConnection,
    session: SessionId,
    outcome: &Outcome,
) -> Result<bool, Error> {
    let begun = sqlx::query!(
        "INSERT INTO ending_sessions (session_id, outcome)
         SELECT $1, $2
         WHERE (SELECT id FROM live_runs WHERE session_id = $1 AND state IN ('held', 'queued') LIMIT 1) IS NOT NULL
         ON CONFLICT (session_id) DO NOTHING",
        session.0,
        Json(outcome) as _,
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!("DELETE FROM waiting_sessions WHERE session_id = $1", session.0)
        .execute(tx)
        .await?;
    Ok(begun.rows_affected() > 0)
}
