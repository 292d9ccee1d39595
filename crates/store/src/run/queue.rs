//! Queued runs: why they wait, and the end of those that waited too long.

use std::fmt;

use codelia_policy::display_duration;
use codelia_types::{Mode, Outcome, Reason, Refusal, RunId};
use sqlx::types::Json;
use uuid::Uuid;

use crate::{Error, Store, row};

/// Why no worker has taken a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitReason {
    /// No worker is alive.
    NoWorker,
    /// No live worker has the mode of the session.
    NoMode(Mode),
    /// No live worker has the session's files.
    NoFiles,
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
            Self::Draining => f.write_str("none ready: all workers are draining"),
            Self::Busy => f.write_str("none ready: all workers are busy"),
            Self::Starting => f.write_str("one is about to take the run"),
        }
    }
}

/// A run that waits.
struct WaitingRun {
    run: Uuid,
    mode: String,
    queue_timeout: Option<sqlx::postgres::types::PgInterval>,
    live: i64,
    with_mode: i64,
    with_files: i64,
    ready: i64,
    free: i64,
}

impl WaitingRun {
    fn reason(&self) -> Result<WaitReason, Error> {
        Ok(match self {
            Self { live: 0, .. } => WaitReason::NoWorker,
            Self { with_mode: 0, .. } => WaitReason::NoMode(row::parse("sessions.spec", &self.mode)?),
            Self { with_files: 0, .. } => WaitReason::NoFiles,
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
            display_duration(waited),
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
            "SELECT id FROM runs WHERE state = 'queued' AND queued_until <= now() ORDER BY queued_until LIMIT $1",
            limit,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        if due.is_empty() {
            return Ok(0);
        }
        let waiting = self.run_waiting(&due).await?;
        let outcomes =
            waiting.iter().map(|run| Ok(Json(run.outcome()?))).collect::<Result<Vec<_>, Error>>()?;
        let ids: Vec<Uuid> = waiting.iter().map(|run| run.run).collect();
        let ended = sqlx::query!(
            "WITH due AS (
                 SELECT id FROM runs WHERE id = ANY ($1) AND state = 'queued' AND queued_until <= now()
                 FOR UPDATE SKIP LOCKED
             )
             UPDATE runs r SET state = 'ended', ended_at = now(), outcome = o.outcome, secret_env = NULL
             FROM due JOIN unnest($1::uuid[], $2::jsonb[]) AS o (id, outcome) ON o.id = due.id
             WHERE r.id = due.id",
            &ids,
            &outcomes as _,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(ended.rows_affected())
    }

    async fn run_waiting(&self, ids: &[Uuid]) -> Result<Vec<WaitingRun>, Error> {
        Ok(sqlx::query_file_as!(WaitingRun, "src/sql/run_wait_reason.sql", ids)
            .fetch_all(&self.pools.reads)
            .await?)
    }
}
