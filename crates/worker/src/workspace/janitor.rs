//! The janitor: ends what is over, and removes the directories of what has ended. Idempotent.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_store::Error;
use codelia_sys::memory;
use codelia_telemetry::metrics;
use codelia_types::SessionId;
use futures::{StreamExt, stream};
use tokio::task::spawn_blocking;

use crate::{lease::keeper::Current, worker::Worker, workspace::root::RootError};

/// The most that one sweep takes on.
const SWEEP_LIMIT: i64 = 200;
/// The most events that one look removes.
const PURGE_LIMIT: i64 = 10_000;
/// Directories removed at once.
const REMOVED_AT_ONCE: usize = 4;
/// Directories asked about at once.
const ORPHANS_AT_ONCE: usize = 500;
/// How often directories without a session are looked for.
pub(crate) const ORPHANS_EVERY: Duration = Duration::from_secs(60);

/// Sweeps once.
pub(crate) async fn run_once(worker: &Arc<Worker>) -> Result<(), Error> {
    worker.sessions.tidy_spares(memory_is_short(worker));
    worker.modes.sweep().await;
    show(worker);
    let current = worker.current();
    if !current.is_live() {
        return Ok(());
    }
    let swept = worker.store.lease_sweep_any_tenant(SWEEP_LIMIT).await?;
    if swept.sessions > 0 {
        tracing::warn!(?swept, "leases of workers that are gone");
        worker.poll_now.notify_one();
    }
    worker.store.session_expire_any_tenant(SWEEP_LIMIT).await?;
    remove_ended(worker, &current).await?;
    metrics().queue_depth(worker.store.run_queue_depth_any_tenant().await?);
    Ok(())
}

/// Spare sandboxes are the first to go: the next run only takes longer without them.
fn memory_is_short(worker: &Worker) -> bool {
    match memory::available_bytes() {
        Ok(bytes) => bytes < worker.options.min_free_memory_bytes,
        Err(error) => {
            tracing::warn!(%error, "the memory that is left is not known");
            true
        }
    }
}

/// Removes what belongs to nobody: directories without a session, old trash, old rows.
pub(crate) async fn tidy(worker: &Arc<Worker>) -> Result<(), Error> {
    if !worker.current().is_live() {
        return Ok(());
    }
    let shared = worker.clone();
    blocking(move || shared.root.empty_trash()).await;
    let shared = worker.clone();
    let found = blocking(move || shared.root.list_sessions()).await.unwrap_or_default();
    for ids in found.chunks(ORPHANS_AT_ONCE) {
        for id in worker.store.session_list_orphans(worker.root.id, ids).await? {
            if worker.removals.is_due(id) && worker.runs.of_session(id).is_empty() {
                remove_directory(worker, id).await;
            }
        }
    }
    worker.store.session_purge_any_tenant(worker.options.output_retention, SWEEP_LIMIT).await?;
    worker.store.event_purge_any_tenant(worker.options.output_retention, PURGE_LIMIT).await?;
    Ok(())
}

async fn remove_ended(worker: &Arc<Worker>, current: &Current) -> Result<(), Error> {
    let ended = worker
        .store
        .session_list_removable(worker.id(), current.incarnation, worker.root.id, SWEEP_LIMIT)
        .await?;
    stream::iter(ended)
        .for_each_concurrent(REMOVED_AT_ONCE, |id| async move {
            if let Err(error) = remove_session(worker, id).await {
                tracing::warn!(%error, session = %id, "a removal is not recorded; trying again");
            }
        })
        .await;
    Ok(())
}

/// Removes an ended session, once its runs have ended and are committed: that needs its lease.
async fn remove_session(worker: &Arc<Worker>, id: SessionId) -> Result<(), Error> {
    worker.close_session(id);
    let is_due = worker.removals.is_due(id) && worker.runs.of_session(id).is_empty();
    if !is_due || !remove_directory(worker, id).await {
        return Ok(());
    }
    worker.store.session_mark_removed(id, worker.root.id).await?;
    worker.sessions.forget(id);
    Ok(())
}

async fn remove_directory(worker: &Arc<Worker>, id: SessionId) -> bool {
    let (shared, begun) = (worker.clone(), Instant::now());
    match blocking(move || shared.root.remove_session(id)).await {
        Some(bytes) => {
            tracing::info!(session = %id, bytes, "session directory removed");
            metrics().session_removed(bytes, begun.elapsed());
            worker.removals.succeeded(id);
            true
        }
        None => {
            metrics().session_removal_failed();
            worker.removals.failed(id);
            false
        }
    }
}

/// Does file work beside the runtime; a failure is logged.
async fn blocking<T, F>(work: F) -> Option<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, RootError> + Send + 'static,
{
    let done = spawn_blocking(work).await.map_err(|panic| RootError::interrupted(panic.into())).flatten();
    done.inspect_err(|error| tracing::error!(error = error as &dyn std::error::Error, "the session root"))
        .ok()
}

fn show(worker: &Worker) {
    let (capacity, busy) = {
        let slots = worker.slots();
        (slots.capacity(), slots.busy())
    };
    let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    metrics().worker(count(capacity), count(busy), count(worker.sessions.count()));
    metrics().sessions_stuck(count(worker.removals.count()));
}
