//! Events of runs that end.

use std::time::Duration;

use codelia_types::{Changes, Outcome, RunId, SessionId, TenantId, WorkerId};
use serde_json::json;
use sqlx::types::Json;
use uuid::Uuid;

use super::{
    event::{EventBody, EventSubject},
    kind::EventKind,
    log::{AuditLog, EventColumns, SignedEvent},
};
use crate::{error::Error, row, run::RunRef};

/// A run that ends without a result of a worker.
pub(crate) struct RunEnd {
    id: RunId,
    session: SessionId,
    tenant: TenantId,
    worker: Option<WorkerId>,
    outcome: Outcome,
}

impl RunEnd {
    /// The end of a run with these columns.
    pub(crate) fn new(
        run: Uuid,
        session: Uuid,
        tenant: &str,
        worker: Option<&str>,
        outcome: Outcome,
    ) -> Result<Self, Error> {
        Ok(Self {
            id: RunId(run),
            session: SessionId(session),
            tenant: row::parse("live_runs.tenant_id", tenant)?,
            worker: row::parse_optional("live_runs.worker_id", worker)?,
            outcome,
        })
    }
}

/// Several runs that end, as arrays of columns.
pub(crate) struct RunEnds<'a> {
    pub(crate) runs: Vec<Uuid>,
    /// How each of them ends, in the same order.
    pub(crate) outcomes: Vec<Json<&'a Outcome>>,
    /// The event of each of them, in the same order.
    pub(crate) events: EventColumns,
}

impl AuditLog {
    /// The event of a run that ends.
    pub(crate) fn run_end(
        &self,
        run: RunRef<'_>,
        worker: Option<&WorkerId>,
        outcome: &Outcome,
    ) -> SignedEvent {
        self.event(&EventSubject::of_run(run, worker), &run_end(outcome, None, 0, None))
    }

    /// The columns of runs that end.
    pub(crate) fn run_ends<'a>(&self, ends: &'a [RunEnd]) -> RunEnds<'a> {
        let mut columns =
            RunEnds { runs: Vec::new(), outcomes: Vec::new(), events: self.columns() };
        for RunEnd { id, session, tenant, worker, outcome } in ends {
            let run = RunRef { id: *id, session: *session, tenant };
            columns.runs.push(id.0);
            columns.outcomes.push(Json(outcome));
            columns.events.push(self.run_end(run, worker.as_ref(), outcome));
        }
        columns
    }
}

/// The event of the end of a run: the outcome, and how long its command ran.
pub(crate) fn run_end(
    outcome: &Outcome,
    ran_for: Option<Duration>,
    violations: u64,
    changes: Option<&Changes>,
) -> EventBody {
    let reason = match outcome {
        Outcome::Refused(refusal) => Some(refusal.reason.as_str()),
        Outcome::Lost(reason) => Some(reason.as_str()),
        _ => None,
    };
    let detail = json!({
        "outcome": outcome.kind(),
        "reason": reason,
        "exit_code": match outcome { Outcome::Exited(code) => Some(code), _ => None },
        "duration_ms": ran_for.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        "violations": violations,
        "changes": changes.map(|changes| json!({
            "state": changes.state, "added": changes.added, "changed": changes.changed, "removed": changes.removed,
        })),
    });
    EventBody::new(EventKind::RunEnded, detail)
}
