//! Whether the lease keeper still works: it records progress after each of its steps.
//!
//! A step that fails is progress, too. A database that is down must not make every worker restart:
//! it ends leases, and the keeper registers again by itself. Only a keeper that is stuck needs a
//! restart.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::lease::worker_lease::LeaseTerm;

/// The keeper renews after a third of the lease time, and each call of it ends within the lease
/// time.
const MAX_LEASE_TIMES: u32 = 3;

/// The time of the keeper's last step. Read by other threads, also while the keeper's is stuck.
#[derive(Debug)]
pub(crate) struct Progress {
    last: Mutex<Instant>,
    max_pause: Duration,
}

impl Progress {
    pub(crate) fn new(term: LeaseTerm) -> Self {
        Self { last: Mutex::new(Instant::now()), max_pause: term.ttl * MAX_LEASE_TIMES }
    }

    pub(super) fn record(&self) {
        *self.last.lock() = Instant::now();
    }

    /// Whether the keeper has completed a step recently.
    pub(crate) fn is_recent(&self) -> bool {
        self.last.lock().elapsed() < self.max_pause
    }
}
