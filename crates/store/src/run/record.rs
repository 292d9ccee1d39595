//! A run as the tables `live_runs` and `ended_runs` have it.

use std::collections::BTreeMap;

use codelia_policy::RunSpec;
use codelia_types::{
    ApprovalId, CommittedRun, EndedRun, LeaseEpoch, Outcome, RunId, RunResult, SessionId, TenantId,
    WorkerId,
};
use time::OffsetDateTime;

use crate::{error::Error, row, words::words};

/// Selects runs that have not ended, or ended ones, by a condition and its arguments.
macro_rules! select_runs {
    (live $($rest:tt)*) => {
        select_runs!(
            "(SELECT *, NULL::timestamptz AS started_at, NULL::timestamptz AS ended_at, NULL::jsonb AS result,
                     NULL::jsonb AS changes
              FROM live_runs) AS r",
            $($rest)*
        )
    };
    (ended $($rest:tt)*) => {
        select_runs!("(SELECT *, 'ended' AS state, NULL::uuid AS approval_id FROM ended_runs) AS r", $($rest)*)
    };
    ($from:literal, $large_columns:literal, $condition:literal $(+ $rest:literal)*, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            "SELECT " + $large_columns + r#", r.id, r.session_id, r.tenant_id,
                      r.labels AS "labels: Json<BTreeMap<String, String>>", r.state AS "state!", r.approval_id,
                      r.cancel_requested_at IS NOT NULL AS "cancel_requested!", r.cancel_reason, r.attempt, r.worker_id,
                      r.lease_epoch, r.created_at, r.started_at, r.ended_at AS "ended_at?", w.address AS "worker_address?"
               FROM "# + $from + r#"
               LEFT JOIN workers w ON r.state = 'running' AND w.id = r.worker_id AND w.incarnation = r.incarnation
                   AND w.lease_until > now()
               WHERE "# + $condition $(+ $rest)*,
            $($argument),*
        )
        .try_map(|row| {
            let end = row.ended_at.zip(row.result).map(|(ended_at, result)| codelia_types::EndedRun {
                started_at: row.started_at,
                ended_at,
                result: result.0,
            });
            Ok($crate::Run {
                id: codelia_types::RunId(row.id),
                session: codelia_types::SessionId(row.session_id),
                tenant: $crate::row::parse("runs.tenant_id", &row.tenant_id)?,
                spec: row.spec.0,
                labels: row.labels.0,
                state: $crate::run::record::parse_state(&row.state)?,
                approval: row.approval_id.map(codelia_types::ApprovalId),
                cancel_requested: row.cancel_requested,
                cancel_reason: row.cancel_reason,
                attempt: row.attempt,
                worker: $crate::row::parse_optional("runs.worker_id", row.worker_id.as_deref())?,
                lease_epoch: row.lease_epoch.map(codelia_types::LeaseEpoch),
                worker_address: row.worker_address,
                created_at: row.created_at,
                end,
            })
        })
    };
}

pub(super) use select_runs;

/// A run. `Spec` is what is known of its spec.
#[derive(Debug, Clone)]
pub struct Run<Spec = RunSpec> {
    /// Identifies the run; begins with the time of its insert.
    pub id: RunId,
    /// The session that it runs in.
    pub session: SessionId,
    /// The tenant that owns it.
    pub tenant: TenantId,
    /// The spec as it was admitted.
    pub spec: Spec,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// How far it has come.
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
    /// The result and times, once it has ended.
    pub end: Option<EndedRun>,
}

words! {
    /// The state of a run.
    RunState {
        /// No worker has started it. It waits for a worker, or for an approval.
        Queued = "queued",
        /// The worker may have started it.
        Running = "running",
        /// The run has an outcome.
        Ended = "ended",
    }
}

/// The state of a run that waits for an approval. No statement that looks for queued runs finds it.
pub(super) const HELD: &str = "held";

/// Converts the column `state`.
pub(super) fn parse_state(word: &str) -> Result<RunState, Error> {
    if word == HELD { Ok(RunState::Queued) } else { row::parse("runs.state", word) }
}

/// A run, with the names of what it belongs to.
#[derive(Debug, Clone, Copy)]
pub struct RunRef<'a> {
    /// The run itself.
    pub id: RunId,
    /// The session that it runs in.
    pub session: SessionId,
    /// The tenant that owns both.
    pub tenant: &'a TenantId,
}

impl<Spec> Run<Spec> {
    /// The result, if the run has ended.
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
