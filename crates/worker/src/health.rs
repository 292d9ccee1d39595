//! The state of a worker for probes.

use std::sync::Arc;

use crate::{
    lease::{drain_state::DrainState, progress::Progress, worker_lease::LeaseHandle},
    worker::Worker,
};

/// The state of a worker for probes. Cheap to clone and to ask; never waits.
#[derive(Debug, Clone)]
pub struct Health {
    lease: LeaseHandle,
    drain: Arc<DrainState>,
    progress: Arc<Progress>,
}

impl Health {
    pub(crate) fn new(worker: &Worker) -> Self {
        Self {
            lease: worker.core.lease.clone(),
            drain: worker.core.drain.clone(),
            progress: worker.progress.clone(),
        }
    }

    /// Whether the lease keeper works. It does also while the database fails: to restart the worker
    /// would not help then.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.progress.is_recent()
    }

    /// Whether the worker can take work: its lease is live and it does not drain.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.lease.is_live() && !self.drain.is_draining()
    }
}
