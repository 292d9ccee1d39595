//! What probes ask of a worker.

use std::sync::Arc;

use crate::{
    lease::{drain_state::DrainState, turns::Turns, worker_lease::LeaseHandle},
    worker::Worker,
};

/// The state of a worker for probes. Cheap to clone and to ask; never waits.
#[derive(Debug, Clone)]
pub struct Health {
    lease: LeaseHandle,
    drain: Arc<DrainState>,
    turns: Arc<Turns>,
}

impl Health {
    pub(crate) fn of(worker: &Worker) -> Self {
        Self { lease: worker.lease.clone(), drain: worker.drain.clone(), turns: worker.turns.clone() }
    }

    /// Whether the lease keeper works. It does also while the database fails: to restart the worker
    /// would not help then.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.turns.are_recent()
    }

    /// Whether the worker can take work: its lease is live and it does not drain.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.lease.is_live() && !self.drain.is_draining()
    }
}
