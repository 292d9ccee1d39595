//! Spare sandboxes: prepared before a session's next run, bounded over all sessions.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use codelia_backends::Prepared;
use codelia_policy::Plan;
use codelia_telemetry::task;
use codelia_types::Refusal;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinHandle,
    time::Instant,
};

use crate::sandbox::{backends::serves, receipts::Receipts};

/// An older spare sandbox is not used: what it was prepared from may have changed.
pub(crate) const MAX_SPARE_AGE: Duration = Duration::from_secs(600);

/// A sandbox that is prepared, or being prepared, for a session's next run.
#[derive(Debug)]
pub(crate) struct Spare {
    plan: Plan,
    started_at: Instant,
    preparing: JoinHandle<Result<Box<dyn Prepared>, Refusal>>,
    /// Reserved for its sockets, in network mode `proxy`.
    descriptors: Option<OwnedSemaphorePermit>,
    _permit: OwnedSemaphorePermit,
}

impl Spare {
    /// Starts to prepare one in the background.
    pub(crate) fn start<F>(
        permit: OwnedSemaphorePermit,
        descriptors: Option<OwnedSemaphorePermit>,
        plan: Plan,
        prepare: impl FnOnce(Plan) -> F,
    ) -> Self
    where
        F: Future<Output = Result<Box<dyn Prepared>, Refusal>> + Send + 'static,
    {
        let preparing = task::background("prepare spare", prepare(plan.clone()));
        Self { plan, started_at: Instant::now(), preparing, descriptors, _permit: permit }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.preparing.is_finished()
    }

    /// Waits for the sandbox; `None` if it could not be prepared. Comes with its descriptors.
    pub(crate) async fn into_sandbox(
        self,
    ) -> Option<(Box<dyn Prepared>, Option<OwnedSemaphorePermit>)> {
        Some((self.preparing.await.ok()?.ok()?, self.descriptors))
    }

    /// Whether a run with this plan may use it.
    pub(crate) fn fits(&self, wanted: &Plan) -> bool {
        !self.is_too_old() && serves(&self.plan, wanted)
    }

    pub(crate) fn is_too_old(&self) -> bool {
        self.started_at.elapsed() >= MAX_SPARE_AGE
    }
}

/// Limits how many spare sandboxes exist, and destroys those that are not used.
#[derive(Debug)]
pub(crate) struct SparePool {
    permits: Arc<Semaphore>,
    max: u32,
    memory_is_short: AtomicBool,
    receipts: Arc<Receipts>,
}

impl SparePool {
    pub(crate) fn new(max: usize, receipts: Arc<Receipts>) -> Self {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        let permits = Arc::new(Semaphore::new(max as usize));
        Self { permits, max, memory_is_short: AtomicBool::new(false), receipts }
    }

    /// Permission for one more; `None` if there are too many or memory is short.
    pub(crate) fn try_reserve(&self) -> Option<OwnedSemaphorePermit> {
        if self.memory_is_short.load(Ordering::Relaxed) {
            return None;
        }
        self.permits.clone().try_acquire_owned().ok()
    }

    pub(crate) fn set_memory_is_short(&self, is_short: bool) {
        if self.memory_is_short.swap(is_short, Ordering::Relaxed) != is_short {
            tracing::info!(is_short, "memory for spare sandboxes changed");
        }
    }

    /// Destroys a spare sandbox in the background.
    pub(crate) fn discard(&self, spare: Option<Box<Spare>>) {
        let Some(spare) = spare else { return };
        let receipts = self.receipts.clone();
        task::background("discard spare", async move {
            // Holds the permits until the sandbox is gone, for `empty`.
            let Spare { preparing, descriptors: _descriptors, _permit, .. } = *spare;
            if let Ok(Ok(sandbox)) = preparing.await {
                receipts.record(sandbox.discard().await);
            }
        });
    }

    /// Waits until no spare sandbox is left.
    pub(crate) async fn empty(&self) {
        // Fails only if the semaphore is closed, which never happens.
        let _ = self.permits.acquire_many(self.max).await;
    }
}
