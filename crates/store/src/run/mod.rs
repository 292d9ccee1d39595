//! The tables `live_runs`, of runs that have not ended, and `ended_runs`, their history. Ending a run is
//! one statement that moves its row. Every run gets exactly one outcome.

mod assignment;
mod commit_group;
mod held;
mod insert;
mod insert_group;
mod list;
mod queue;
mod recorded;
mod settings;
mod summary;

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use codelia_policy::RunSpec;
use codelia_types::{
    ApprovalId, Changes, EndedRun, LeaseEpoch, Outcome, Receipt, RunId, SessionId, TenantId, Usage,
    Violations, WorkerId,
};
use sqlx::types::Json;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    Error, Store,
    audit::{RunEnd, SignedEvent},
    row,
};

pub use assignment::{AssignedRun, HeldSessions, RunCommit, RunRef};
pub(crate) use commit_group::CommitCall;
pub(crate) use held::of_session as held_changes;
pub use held::{ChangesDecision, HeldChanges};
pub use insert::{ActiveRuns, NewRun, RunAdmission};
pub(crate) use insert_group::InsertCall;
pub(crate) use list::{first_id, ordered, read_in_order};
pub use queue::WaitReason;
pub(crate) use queue::{EndingRun, begin_queue_end};
pub use recorded::RecordedRun;
pub(crate) use settings::KnownSettings;
pub use summary::{RunSummary, SpecSummary};

/// Selects runs that have not ended, or ended ones, by a condition and its arguments.
macro_rules! select_runs {
    (live $row:ident, $($rest:tt)*) => {
        select_runs!(
            $row,
            "(SELECT *, NULL::text AS sandbox_root, NULL::timestamptz AS started_at, NULL::timestamptz AS ended_at,
                     NULL::bigint AS setup_micros, NULL::boolean AS prepared, NULL::text[] AS unenforced,
                     NULL::text[] AS watched, NULL::jsonb AS outcome, NULL::jsonb AS usage, NULL::jsonb AS receipt,
                     0::bigint AS output_bytes, false AS output_truncated, NULL::bigint AS output_total,
                     NULL::jsonb AS violations, NULL::jsonb AS changes
              FROM live_runs) AS r",
            $($rest)*
        )
    };
    (ended $row:ident, $($rest:tt)*) => {
        select_runs!($row, "(SELECT *, 'ended' AS state, NULL::uuid AS approval_id FROM ended_runs) AS r", $($rest)*)
    };
    ($row:ident, $from:literal, $large_columns:literal, $condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            $row,
            "SELECT " + $large_columns + r#", r.id, r.session_id, r.tenant_id,
                      r.labels AS "labels: Json<BTreeMap<String, String>>", r.state AS "state!", r.approval_id,
                      r.cancel_requested_at IS NOT NULL AS "cancel_requested!", r.cancel_reason, r.attempt, r.worker_id, r.lease_epoch,
                      r.sandbox_root, r.created_at, r.started_at, r.ended_at, r.setup_micros, r.prepared, r.unenforced, r.watched,
                      r.usage AS "usage: Json<Usage>", r.receipt AS "receipt: Json<Receipt>",
                      r.output_bytes AS "output_bytes!", r.output_truncated AS "output_truncated!", r.output_total,
                      w.address AS "worker_address?"
               FROM "# + $from + r#"
               LEFT JOIN workers w ON r.state = 'running' AND w.id = r.worker_id AND w.incarnation = r.incarnation
                   AND w.lease_until > now()
               WHERE "# + $condition,
            $($argument),*
        )
    };
}

use select_runs;

/// A run. `Spec` is what is known of its spec.
#[derive(Debug, Clone)]
pub struct Run<Spec = RunSpec> {
    /// The id.
    pub id: RunId,
    /// The session.
    pub session: SessionId,
    /// The tenant.
    pub tenant: TenantId,
    /// The spec as it was admitted.
    pub spec: Spec,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// The state.
    pub state: RunState,
    /// The approval that it waits for.
    pub approval: Option<ApprovalId>,
    /// Whether a caller requested cancellation.
    pub cancel_requested: bool,
    /// The reason that was given for it.
    pub cancel_reason: Option<String>,
    /// The attempt, from 1.
    pub attempt: i32,
    /// The worker that executes or executed it.
    pub worker: Option<WorkerId>,
    /// The epoch of the lease under which it was started.
    pub lease_epoch: Option<LeaseEpoch>,
    /// The session's directory on that worker.
    pub sandbox_root: Option<String>,
    /// When it was inserted.
    pub created_at: OffsetDateTime,
    /// When its command started.
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    pub ended_at: Option<OffsetDateTime>,
    /// Time from the launch request to the command's `execve`.
    pub setup_time: Option<Duration>,
    /// Whether its sandbox was prepared in advance.
    pub prepared: Option<bool>,
    /// Limits that the mode could not enforce.
    pub unenforced: Vec<String>,
    /// Limits that were only watched.
    pub watched: Vec<String>,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// Resources that it used.
    pub usage: Option<Usage>,
    /// What its sandbox left behind.
    pub receipt: Option<Receipt>,
    /// Bytes of output kept.
    pub output_bytes: i64,
    /// Whether output after the limit was not kept.
    pub output_truncated: bool,
    /// Bytes of output that the command wrote, if it has ended and they were counted.
    pub output_total: Option<i64>,
    /// Violations of its policy.
    pub violations: Violations,
    /// What it changed, if it was transactional and started.
    pub changes: Option<Changes>,
    /// Address of its worker, while it runs on a live one.
    pub worker_address: Option<String>,
}

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// No worker has started it. It waits for a worker, or for an approval.
    Queued,
    /// Its worker may have started it.
    Running,
    /// It has an outcome.
    Ended,
}

impl RunState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Ended => "ended",
        }
    }
}

/// The state of a run that waits for an approval. No statement that looks for queued runs finds it.
const HELD: &str = "held";

impl FromStr for RunState {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        if text == HELD {
            return Ok(Self::Queued);
        }
        [Self::Queued, Self::Running, Self::Ended].into_iter().find(|state| state.as_str() == text).ok_or(())
    }
}

/// How to cancel a run.
#[derive(Debug, Clone, Default)]
pub struct Cancellation {
    /// Why.
    pub reason: Option<String>,
    /// From SIGTERM to SIGKILL; `None` takes the worker's setting.
    pub grace: Option<Duration>,
}

/// Which runs to list.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Runs of this session.
    pub session: Option<SessionId>,
    /// Runs in this state.
    pub state: Option<RunState>,
    /// Runs inserted at this time or later.
    pub created_after: Option<OffsetDateTime>,
    /// Runs inserted before this time.
    pub created_before: Option<OffsetDateTime>,
    /// Runs that have all these labels.
    pub labels: BTreeMap<String, String>,
    /// Runs older than this one.
    pub before: Option<RunId>,
}

impl Store {
    /// Returns a tenant's run.
    pub async fn run_get(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Error> {
        macro_rules! select_whole {
            ($table:ident) => {
                select_runs!(
                    $table WholeRow,
                    r#"r.spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = r.settings_hash), '{}')
                           AS "spec!: Json<RunSpec>",
                       r.outcome AS "outcome: Json<Outcome>", r.violations AS "violations: Json<Violations>",
                       r.changes AS "changes: Json<Changes>""#,
                    "r.tenant_id || '' = $1 AND r.id = $2",
                    tenant.as_str(),
                    id.0,
                )
                .fetch_optional(&self.pools.runs)
                .await?
            };
        }
        // A run that ends between the two statements is found by the second.
        let row = match select_whole!(live) {
            Some(row) => Some(row),
            None => select_whole!(ended),
        };
        row.map(Run::try_from).transpose()
    }

    /// Requests the cancellation of a run. A queued or held run ends as canceled immediately. An ended run
    /// stays as it is. A repeated request keeps the first reason and can only shorten the grace.
    pub async fn run_cancel(
        &self,
        tenant: &TenantId,
        id: RunId,
        cancellation: &Cancellation,
    ) -> Result<Option<Run>, Error> {
        // The event of its end names the session.
        let session = sqlx::query_scalar!(
            "SELECT session_id FROM live_runs WHERE tenant_id || '' = $1 AND id = $2",
            tenant.as_str(),
            id.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        if let Some(session) = session {
            let run = RunRef { id, session: SessionId(session), tenant };
            self.run_cancel_live(run, cancellation).await?;
        }
        self.run_get(tenant, id).await
    }

    async fn run_cancel_live(&self, run: RunRef<'_>, cancellation: &Cancellation) -> Result<(), Error> {
        let SignedEvent { event, mac } =
            self.audit.run_end(RunEnd { run, worker: None, outcome: &Outcome::Canceled });
        let ended = sqlx::query_file!(
            "src/sql/run_cancel.sql",
            run.tenant.as_str(),
            run.id.0,
            cancellation.reason,
            cancellation.grace.map(row::interval) as _,
            event.writer,
            event.id,
            event.at,
            event.detail,
            mac,
        )
        .execute(&self.pools.runs)
        .await?;
        if ended.rows_affected() == 0 {
            self.audit.forget(event.id);
        }
        Ok(())
    }

    /// Counts the queued runs of all tenants.
    pub async fn run_queue_any_tenant(&self) -> Result<Queue, Error> {
        let queue = sqlx::query_as!(
            Queue,
            r#"SELECT count(*) AS "depth!", min(created_at) AS oldest_at FROM live_runs WHERE state = 'queued'"#
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok(queue)
    }
}

/// The queued runs of all tenants.
#[derive(Debug, Clone, Copy)]
pub struct Queue {
    /// Their number.
    pub depth: i64,
    /// When the oldest was created.
    pub oldest_at: Option<OffsetDateTime>,
}

impl Run {
    /// Returns the run with its result, or `None` if the result is that of another attempt.
    #[must_use]
    pub fn ended(&self, ended: EndedRun) -> Option<Self> {
        let EndedRun { result, attempt, started_at, ended_at, cancel_reason } = ended;
        (attempt == self.attempt).then(|| Self {
            state: RunState::Ended,
            approval: None,
            cancel_reason,
            sandbox_root: Some(result.sandbox_root),
            started_at,
            ended_at: Some(ended_at),
            setup_time: result.setup_time,
            prepared: Some(result.prepared),
            unenforced: result.unenforced,
            watched: result.watched,
            outcome: Some(result.outcome),
            usage: Some(result.usage),
            receipt: Some(result.receipt),
            output_bytes: result.output_bytes,
            output_truncated: result.output_truncated,
            output_total: Some(result.output_total),
            violations: result.violations,
            changes: result.changes,
            worker_address: None,
            ..self.clone()
        })
    }
}

type WholeRow = RunRow<RunSpec>;

struct RunRow<Spec> {
    id: Uuid,
    session_id: Uuid,
    tenant_id: String,
    spec: Json<Spec>,
    labels: Json<BTreeMap<String, String>>,
    state: String,
    approval_id: Option<Uuid>,
    cancel_requested: bool,
    cancel_reason: Option<String>,
    attempt: i32,
    worker_id: Option<String>,
    lease_epoch: Option<i64>,
    sandbox_root: Option<String>,
    created_at: OffsetDateTime,
    started_at: Option<OffsetDateTime>,
    ended_at: Option<OffsetDateTime>,
    setup_micros: Option<i64>,
    prepared: Option<bool>,
    unenforced: Option<Vec<String>>,
    watched: Option<Vec<String>>,
    outcome: Option<Json<Outcome>>,
    usage: Option<Json<Usage>>,
    receipt: Option<Json<Receipt>>,
    output_bytes: i64,
    output_truncated: bool,
    output_total: Option<i64>,
    violations: Option<Json<Violations>>,
    changes: Option<Json<Changes>>,
    worker_address: Option<String>,
}

impl<Spec> TryFrom<RunRow<Spec>> for Run<Spec> {
    type Error = Error;

    fn try_from(row: RunRow<Spec>) -> Result<Self, Error> {
        Ok(Self {
            id: RunId(row.id),
            session: SessionId(row.session_id),
            tenant: row::parse("runs.tenant_id", &row.tenant_id)?,
            spec: row.spec.0,
            labels: row.labels.0,
            state: row::parse("runs.state", &row.state)?,
            approval: row.approval_id.map(ApprovalId),
            cancel_requested: row.cancel_requested,
            cancel_reason: row.cancel_reason,
            attempt: row.attempt,
            worker: row.worker_id.map(|text| row::parse("runs.worker_id", &text)).transpose()?,
            lease_epoch: row.lease_epoch.map(LeaseEpoch),
            sandbox_root: row.sandbox_root,
            created_at: row.created_at,
            started_at: row.started_at,
            ended_at: row.ended_at,
            setup_time: row.setup_micros.map(row::micros),
            prepared: row.prepared,
            unenforced: row.unenforced.unwrap_or_default(),
            watched: row.watched.unwrap_or_default(),
            outcome: row.outcome.map(|json| json.0),
            usage: row.usage.map(|json| json.0),
            receipt: row.receipt.map(|json| json.0),
            output_bytes: row.output_bytes,
            output_truncated: row.output_truncated,
            output_total: row.output_total,
            violations: row.violations.map(|json| json.0).unwrap_or_default(),
            changes: row.changes.map(|json| json.0),
            worker_address: row.worker_address,
        })
    }
}
