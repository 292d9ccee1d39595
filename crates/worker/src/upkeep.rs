//! Upkeep: removes the directories of ended sessions on this worker's root. Idempotent: each
//! sweep reads the store again.

use std::{future::ready, pin::pin, sync::Arc, time::Instant};

use codelia_store::Error;
use codelia_sys::memory;
use codelia_telemetry::metrics;
use codelia_types::SessionId;
use futures::{StreamExt, stream};

use crate::{
    core::Core,
    file_work::blocking,
    lease::worker_lease::WorkerLease,
    run::changes::held,
    session::acquire::SessionLeases,
    workspace::{removal_backoff::RemovalBackoff, root::RootError},
};

/// Rows that one sweep handles at most.
const SWEEP_LIMIT: i64 = 200;
/// Directories that are removed concurrently.
const MAX_CONCURRENT_REMOVALS: usize = 4;
/// Removed sessions that one statement records.
const MAX_RECORDED: usize = 64;
/// Directories that one query looks up.
const ORPHANS_PER_QUERY: usize = 500;

/// Removes what has ended.
#[derive(Debug)]
pub(crate) struct Upkeep {
    pub(crate) core: Arc<Core>,
    pub(crate) removals: RemovalBackoff,
    pub(crate) leases: SessionLeases,
}

impl Upkeep {
    /// Makes one sweep.
    pub(crate) async fn sweep(&self) -> Result<(), Error> {
        self.core.sessions.trim_spares(self.memory_is_short());
        self.report_metrics();
        let root = self.core.root.clone();
        logged(move || {
            root.close_sessions(false);
            Ok(())
        })
        .await;
        let current = self.core.lease.current();
        if !current.is_live() {
            return Ok(());
        }
        held::drop_expired(&self.core).await;
        self.remove_ended(&current).await
    }

    /// Removes leftovers: directories without a session, old trash.
    pub(crate) async fn purge(&self) -> Result<(), Error> {
        if !self.core.lease.is_live() {
            return Ok(());
        }
        let root = self.core.root.clone();
        logged(move || root.empty_trash()).await;
        let root = self.core.root.clone();
        let found = logged(move || root.list_sessions()).await.unwrap_or_default();
        for ids in found.chunks(ORPHANS_PER_QUERY) {
            let mut removed = Vec::new();
            for id in self.core.store.session_list_orphans(self.core.root.id, ids).await? {
                if self.removals.is_due(id)
                    && !self.core.runs.has_active(id)
                    && self.remove_directory(id).await
                {
                    removed.push(id);
                }
            }
            if !removed.is_empty() {
                self.core.store.session_disk_forget(self.core.root.id, &removed).await?;
            }
        }
        self.drop_unheld().await
    }

    /// Removes the directories of volumes that were deleted, or that are on another root by now.
    pub(crate) async fn remove_volumes(&self) -> Result<(), Error> {
        if !self.core.lease.is_live() {
            return Ok(());
        }
        let dirs = self.core.root.volumes();
        let found = blocking(move || dirs.list())
            .await
            .inspect_err(|error| tracing::error!(%error, "cannot list volumes"))
            .unwrap_or_default();
        for ids in found.chunks(ORPHANS_PER_QUERY) {
            for id in self.core.store.volume_list_orphans(self.core.root.id, ids).await? {
                let dirs = self.core.root.volumes();
                match blocking(move || dirs.remove(id)).await {
                    Ok(bytes) => tracing::info!(volume = %id, bytes, "volume directory removed"),
                    Err(error) => {
                        tracing::error!(volume = %id, %error, "cannot remove a volume, retrying")
                    }
                }
            }
        }
        Ok(())
    }

    /// Drops held changes of sessions that nobody holds, when they waited too long: taking a
    /// session does.
    async fn drop_unheld(&self) -> Result<(), Error> {
        let Core { store, root, .. } = &*self.core;
        for id in store.changes_list_expired_any_tenant(root.id, SWEEP_LIMIT).await? {
            self.leases.acquire(id, false).await?;
        }
        Ok(())
    }

    /// Spare sandboxes are given up first: without them the next run only takes longer.
    fn memory_is_short(&self) -> bool {
        match memory::available_bytes() {
            Ok(bytes) => bytes < self.core.options.worker.min_free_memory.bytes(),
            Err(error) => {
                tracing::warn!(%error, "cannot read the free memory, keeping no spare sandboxes");
                true
            }
        }
    }

    async fn remove_ended(&self, current: &WorkerLease) -> Result<(), Error> {
        let Core { store, lease, .. } = &*self.core;
        let root = self.core.root.id;
        let ended = store
            .session_list_removable(lease.worker(), current.incarnation, root, SWEEP_LIMIT)
            .await?;
        let removed = stream::iter(ended)
            .map(|id| async move { self.remove_session(id).await.then_some(id) })
            .buffer_unordered(MAX_CONCURRENT_REMOVALS);
        // Sessions that are removed meanwhile are recorded together. None waits for a slow one.
        let mut removed = pin!(removed.filter_map(ready).ready_chunks(MAX_RECORDED));
        while let Some(ids) = removed.next().await {
            match store.session_mark_removed(&ids, root).await {
                Ok(()) => ids.into_iter().for_each(|id| self.core.sessions.forget(id)),
                Err(error) => {
                    tracing::warn!(%error, sessions = ids.len(), "cannot record session removals, retrying");
                }
            }
        }
        Ok(())
    }

    /// Removes the directory of an ended session when its runs have ended and are committed, which
    /// needs its lease. Returns whether it did.
    async fn remove_session(&self, id: SessionId) -> bool {
        self.core.sessions.close(id);
        self.core.runs.cancel_session(id);
        let is_due = self.removals.is_due(id) && !self.core.runs.has_active(id);
        is_due && self.remove_directory(id).await
    }

    async fn remove_directory(&self, id: SessionId) -> bool {
        // The kept processes have the session's user, which another session gets next.
        self.core.backends.forget_session(id);
        let root = self.core.root.clone();
        let began = Instant::now();
        match logged(move || root.remove_session(id)).await {
            Some(bytes) => {
                tracing::info!(session = %id, bytes, "session directory removed");
                metrics().removals.removed(bytes, began.elapsed());
                self.removals.succeeded(id);
                true
            }
            None => {
                metrics().removals.failed();
                self.removals.failed(id);
                false
            }
        }
    }

    fn report_metrics(&self) {
        let (capacity, busy) = {
            let slots = self.core.slots.lock();
            (slots.capacity(), slots.busy())
        };
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        metrics().worker(count(capacity), count(busy), count(self.core.sessions.count()));
        metrics().removals.stuck(count(self.removals.count()));
    }
}

/// Does file work outside the async runtime; logs a failure.
async fn logged<T, F>(work: F) -> Option<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, RootError> + Send + 'static,
{
    let done = blocking(work).await;
    done.inspect_err(|error| {
        tracing::error!(error = error as &dyn std::error::Error, "session root failed")
    })
    .ok()
}
