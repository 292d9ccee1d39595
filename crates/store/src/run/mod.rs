//! The tables `live_runs`, of runs that have not ended, and `ended_runs`, their history. Ending a
//! run is one statement that moves its row. Every run gets exactly one outcome.

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
    ApprovalId, CommittedRun, EndedRun, LeaseEpoch, Outcome, RunId, RunResult, SessionId, TenantId,
    WorkerId,
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
            "(SELECT *, NULL::timestamptz AS started_at, NULL::timestamptz AS ended_at, NULL::jsonb AS result,
                     NULL::jsonb AS changes
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
                      r.cancel_requested_at IS NOT NULL AS "cancel_requested!", r.cancel_reason, r.attempt, r.worker_id,
                      r.lease_epoch, r.created_at, r.started_at, r.ended_at, w.address AS "worker_address?"
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
    /// Address of its worker, while it runs on a live one.
    pub worker_address: Option<String>,
    /// When it was inserted.
    pub created_at: OffsetDateTime,
    /// Its end.
    pub end: Option<EndedRun>,
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
        [Self::Queued, Self::Running, Self::Ended]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or(())
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
                       r.result || jsonb_build_object('changes', r.changes) AS "result: Json<RunResult>""#,
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

    /// Requests the cancellation of a run. A queued or held run ends as canceled immediately. An
    /// ended run stays as it is. A repeated request keeps the first reason and can only shorten the
    /// grace.
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

    async fn run_cancel_live(
        &self,
        run: RunRef<'_>,
        cancellation: &Cancellation,
    ) -> Result<(), Error> {
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

impl<Spec> Run<Spec> {
    /// Its result, if it has ended.
    #[must_use]
    pub fn result(&self) -> Option<&RunResult> {
        self.end.as_ref().map(|end| &end.result)
    }

    /// How it ended.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        self.result().map(|result| &result.outcome)
    }

    /// Bytes of output that were kept; 0 before its end.
    #[must_use]
    pub fn output_bytes(&self) -> i64 {
        self.result().map_or(0, |result| result.output_bytes)
    }
}

impl Run {
    /// Returns the run with the end that its worker committed, or `None` if that is of another
    /// attempt.
    #[must_use]
    pub fn ended(&self, committed: CommittedRun) -> Option<Self> {
        let CommittedRun { attempt, cancel_reason, end } = committed;
        (attempt == self.attempt).then(|| Self {
            state: RunState::Ended,
            approval: None,
            cancel_reason,
            worker_address: None,
            end: Some(end),
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
    worker_address: Option<String>,
    created_at: OffsetDateTime,
    started_at: Option<OffsetDateTime>,
    ended_at: Option<OffsetDateTime>,
    result: Option<Json<RunResult>>,
}

impl<Spec> TryFrom<RunRow<Spec>> for Run<Spec> {
    type Error = Error;

    fn try_from(row: RunRow<Spec>) -> Result<Self, Error> {
        let end = row.ended_at.zip(row.result).map(|(ended_at, Json(result))| EndedRun {
            started_at: row.started_at,
            ended_at,
            result,
        });
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
            worker_address: row.worker_address,
            created_at: row.created_at,
            end,
        })
    }
}
