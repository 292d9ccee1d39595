//! What the audit records of the end of a run.

use std::time::Duration;

use codelia_types::{Changes, Outcome, WorkerId};
use serde_json::json;
use uuid::Uuid;

use super::{AuditLog, EventColumns, SignedEvent};
use crate::{EventBody, EventKind, EventSubject, RunRef};

/// A run that ends without a result of a worker.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunEnd<'a> {
    /// The run.
    pub(crate) run: RunRef<'a>,
    /// The worker that it was assigned to.
    pub(crate) worker: Option<&'a WorkerId>,
    /// How it ends.
    pub(crate) outcome: &'a Outcome,
}

/// The events of several runs that end, as arrays of columns.
pub(crate) struct RunEnds {
    /// The runs.
    pub(crate) runs: Vec<Uuid>,
    /// Their events, in the same order.
    pub(crate) events: EventColumns,
}

impl RunEnd<'_> {
    fn subject(&self) -> EventSubject {
        let RunRef { id, session, tenant } = self.run;
        EventSubject {
            tenant: Some(tenant.clone()),
            session: Some(session),
            run: Some(id),
            key: None,
            worker: self.worker.cloned(),
        }
    }
}

impl AuditLog {
    /// The event of a run that ends.
    pub(crate) fn run_end(&self, end: RunEnd<'_>) -> SignedEvent {
        self.event(&end.subject(), &run_end(end.outcome, None, 0, None))
    }

    /// The events of runs that end.
    pub(crate) fn run_ends<'a>(&self, ends: impl IntoIterator<Item = RunEnd<'a>>) -> RunEnds {
        let mut all = RunEnds { runs: Vec::new(), events: self.columns() };
        for end in ends {
            all.runs.push(end.run.id.0);
            all.events.push(self.run_end(end));
        }
        all
    }
}

/// What is recorded of the end of a run: the outcome, and how long its command ran.
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
