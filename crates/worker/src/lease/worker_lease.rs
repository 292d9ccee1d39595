//! The lease of one worker incarnation, and the handle through which all parts read it.

use std::{sync::Arc, time::Duration};

use codelia_store::Heartbeat;
use codelia_types::{Incarnation, LeaseEpoch, LeaseToken, WorkerId};
use time::OffsetDateTime;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

/// How long leases are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeaseTerm {
    /// Time to live in the database.
    pub(crate) ttl: Duration,
    /// The worker stops acting this much earlier, so that its sandboxes are dead by the end.
    pub(crate) margin: Duration,
}

/// One incarnation of the worker, and until when it may act.
#[derive(Debug, Clone)]
pub(crate) struct WorkerLease {
    pub(crate) incarnation: Incarnation,
    pub(super) valid_until: Instant,
    /// Cancelled when the lease is lost: everything under it is killed and its results are dropped.
    pub(crate) fence: CancellationToken,
    pub(super) sent_at: Instant,
    database_time: OffsetDateTime,
}

impl WorkerLease {
    /// The state before the first registration: the worker may do nothing.
    pub(crate) fn none() -> Self {
        let now = Instant::now();
        let fence = CancellationToken::new();
        fence.cancel();
        Self {
            incarnation: Incarnation::generate(),
            valid_until: now,
            fence,
            sent_at: now,
            database_time: OffsetDateTime::UNIX_EPOCH,
        }
    }

    /// The lease of a new incarnation.
    pub(super) fn new(
        incarnation: Incarnation,
        sent_at: Instant,
        heartbeat: Heartbeat,
        term: LeaseTerm,
    ) -> Self {
        Self {
            incarnation,
            valid_until: sent_at + (term.ttl - term.margin),
            fence: CancellationToken::new(),
            sent_at,
            database_time: heartbeat.now,
        }
    }

    /// The same lease after a renewal that was sent at `sent_at`.
    pub(super) fn renewed(&self, sent_at: Instant, heartbeat: Heartbeat, term: LeaseTerm) -> Self {
        Self { fence: self.fence.clone(), ..Self::new(self.incarnation, sent_at, heartbeat, term) }
    }

    /// Whether the worker may start and commit runs under this lease.
    pub(crate) fn is_live(&self) -> bool {
        Instant::now() < self.valid_until && !self.fence.is_cancelled()
    }

    /// The time left until the worker must stop acting.
    pub(crate) fn left(&self) -> Duration {
        self.valid_until.saturating_duration_since(Instant::now())
    }

    /// The database's clock, late by one round trip at most.
    pub(crate) fn database_now(&self) -> OffsetDateTime {
        self.database_time + self.sent_at.elapsed()
    }
}

/// The worker's id and its current lease. Only the keeper replaces the lease; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct LeaseHandle {
    worker: WorkerId,
    lease: Arc<watch::Sender<WorkerLease>>,
}

impl LeaseHandle {
    pub(crate) fn new(worker: WorkerId, lease: WorkerLease) -> Self {
        Self { worker, lease: Arc::new(watch::Sender::new(lease)) }
    }

    pub(crate) fn worker(&self) -> &WorkerId {
        &self.worker
    }

    pub(crate) fn current(&self) -> WorkerLease {
        self.lease.borrow().clone()
    }

    /// The current lease; it is not replaced while the reference is held.
    pub(crate) fn borrow(&self) -> watch::Ref<'_, WorkerLease> {
        self.lease.borrow()
    }

    pub(crate) fn is_live(&self) -> bool {
        self.lease.borrow().is_live()
    }

    pub(crate) fn incarnation(&self) -> Incarnation {
        self.lease.borrow().incarnation
    }

    /// The token of a session lease that this worker holds.
    pub(crate) fn token(&self, incarnation: Incarnation, epoch: LeaseEpoch) -> LeaseToken {
        LeaseToken { worker: self.worker.clone(), incarnation, epoch }
    }

    /// Reports every renewal and every new incarnation from now on.
    #[cfg(test)]
    pub(crate) fn subscribe(&self) -> watch::Receiver<WorkerLease> {
        self.lease.subscribe()
    }

    pub(super) fn replace(&self, lease: WorkerLease) {
        self.lease.send_replace(lease);
    }
}
