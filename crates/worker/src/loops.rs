//! The loops of a worker. All are critical: if one ends, the worker must be restarted.

use std::{future::pending, sync::Arc, time::Duration};

use codelia_store::{FlagTally, Upkeep, UpkeepPass};
use codelia_telemetry::{backoff::jittered, metrics, task::CriticalTasks};
use codelia_types::LostReason;
use tokio::{
    sync::{Notify, oneshot},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{
    error::Error, lease::keeper, registration::Registration, run::signs::canary,
    sandbox::receipts::leave_rotation, worker::Worker,
};

/// The task that keeps the lease, on a thread of its own. Without it nothing may start or commit.
pub(crate) const LEASE_KEEPER: &str = "lease keeper";

/// How often upkeep sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// How often a worker looks for what killed workers left on its host; it reads every process.
const LEFTOVERS_INTERVAL: Duration = Duration::from_secs(5);
/// How often upkeep looks for directories that nothing needs.
const PURGE_INTERVAL: Duration = Duration::from_secs(60);
/// How often what sessions use is reported, if it changed.
const USAGE_INTERVAL: Duration = Duration::from_secs(1);
/// How often the worker looks at the free space for sessions.
const SPACE_INTERVAL: Duration = Duration::from_millis(200);
/// Between two attempts to leave the rotation.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Registers a worker and starts all its loops.
pub(crate) async fn start(worker: &Arc<Worker>) -> Result<CriticalTasks, Error> {
    let tasks = CriticalTasks::default();
    start_keeper(worker, &tasks).await?;
    let wakeups = &worker.core.wakeups;
    let poll_interval = worker.core.options.worker.poll_interval;
    woken(worker, &tasks, "poll", poll_interval, &wakeups.poll, |w| async move {
        w.poller.run_once().await
    });
    woken(worker, &tasks, "upkeep", SWEEP_INTERVAL, &wakeups.upkeep, |w| async move {
        w.upkeep.sweep().await
    });
    every(worker, &tasks, "leftovers", LEFTOVERS_INTERVAL, |w| async move {
        w.core.backends.sweep().await;
        Ok(())
    });
    every(worker, &tasks, "volumes", LEFTOVERS_INTERVAL, |w| async move {
        w.upkeep.remove_volumes().await
    });
    every(worker, &tasks, "purge", PURGE_INTERVAL, |w| async move { w.upkeep.purge().await });
    let disk = worker.core.disk.clone();
    tasks.critical_thread("disk monitor", move || disk.monitor()).map_err(Error::Thread)?;
    let w = worker.clone();
    tasks.critical("upkeep", async move { upkeep(&w).await });
    let w = worker.clone();
    tasks.critical("rotation", async move { watch_receipts(&w).await });
    every(worker, &tasks, "mode flags", FlagTally::INTERVAL, |w| async move {
        w.core.flags.flush(&w.core.store).await
    });
    every(worker, &tasks, "disk usage", USAGE_INTERVAL, |w| async move {
        w.disk_reporter.report().await
    });
    every(worker, &tasks, "disk space", SPACE_INTERVAL, |w| async move {
        w.disk_reporter.watch_space().await
    });
    let w = worker.clone();
    tasks.critical("audit checkpoints", async move { w.core.store.audit_checkpoints_run().await });
    if let Some(canaries) = worker.core.backends.canaries() {
        tasks.critical("canary files", canary::follow(worker.core.clone(), canaries.clone()));
    }
    tasks.critical("egress proxy", worker.core.egress.clone().run());
    tasks.critical("egress approvals", worker.core.egress.clone().ask());
    tasks.critical("egress updates", worker.core.egress.clone().follow_sessions());
    Ok(tasks)
}

/// Starts the lease keeper and waits until it has registered the worker.
async fn start_keeper(worker: &Arc<Worker>, tasks: &CriticalTasks) -> Result<(), Error> {
    let (registered, first) = oneshot::channel();
    let w = worker.clone();
    let stop = tasks.stop_token();
    let keep = move || async move {
        let result = keeper::register_first(&w.registration, w.term, &w.core.lease).await;
        let is_registered = result.is_ok();
        if registered.send(result).is_err() || !is_registered {
            return pending().await;
        }
        let _fence = FenceOnExit { registration: &w.registration, stop };
        keeper::keep(&w.registration, w.term, &w.core.lease, &w.progress).await;
    };
    tasks.critical_thread(LEASE_KEEPER, keep).map_err(Error::Thread)?;
    Ok(first.await.map_err(|_| Error::Stopped(LEASE_KEEPER))??)
}

/// Fences the worker if its lease keeper dies, even if nothing else of the worker can react.
struct FenceOnExit<'a> {
    registration: &'a Registration,
    stop: CancellationToken,
}

impl Drop for FenceOnExit<'_> {
    fn drop(&mut self) {
        if !self.stop.is_cancelled() {
            self.registration.fence_now();
        }
    }
}

/// Does the periodic work of the installation, if this worker is its owner. A worker whose database
/// role may not do it leaves it to the apis.
async fn upkeep(worker: &Worker) {
    loop {
        match worker.core.store.upkeep_is_permitted().await {
            Ok(true) => break,
            Ok(false) => return pending().await,
            Err(error) => {
                tracing::warn!(%error, "cannot read the privileges of this role, retrying")
            }
        }
        sleep(jittered(RETRY_DELAY)).await;
    }
    let observe = |pass: &UpkeepPass| {
        metrics().queue(pass.queue_depth, pass.queue_age);
        metrics().runs_lost(LostReason::WorkerLost.as_str(), pass.swept.lost);
        metrics().runs_retried(pass.swept.retried);
        for flag in &pass.tripped {
            metrics().flags.rolled_back(flag.id.as_str(), "guard");
        }
        if let Some(rows) = pass.misplaced {
            metrics().misplaced_rows(rows);
        }
        if pass.swept.sessions > 0 || pass.expired > 0 {
            worker.core.wakeups.poll.notify_one();
            worker.core.wakeups.upkeep.notify_one();
        }
    };
    Upkeep::new(worker.core.store.clone(), worker.core.options.retention).run(observe).await;
}

/// Takes the worker out of rotation when a sandbox left something behind.
async fn watch_receipts(worker: &Worker) {
    let receipt = worker.core.receipts.unclean().await;
    loop {
        worker.core.wakeups.poll.notify_one();
        match leave_rotation(&worker.core.store, worker.core.lease.worker(), receipt).await {
            Ok(()) => return pending().await,
            Err(error) => tracing::warn!(%error, "cannot leave the rotation, retrying"),
        }
        sleep(jittered(RETRY_DELAY)).await;
    }
}

/// Starts a loop that makes a pass about every `interval`.
fn every<F>(
    worker: &Arc<Worker>,
    tasks: &CriticalTasks,
    name: &'static str,
    interval: Duration,
    pass: impl Fn(Arc<Worker>) -> F + Send + 'static,
) where
    F: Future<Output = Result<(), codelia_store::Error>> + Send,
{
    woken(worker, tasks, name, interval, &Arc::default(), pass);
}

/// Starts a loop that makes a pass about every `interval`, and whenever `now` is notified.
fn woken<F>(
    worker: &Arc<Worker>,
    tasks: &CriticalTasks,
    name: &'static str,
    interval: Duration,
    now: &Arc<Notify>,
    pass: impl Fn(Arc<Worker>) -> F + Send + 'static,
) where
    F: Future<Output = Result<(), codelia_store::Error>> + Send,
{
    let worker = worker.clone();
    let now = now.clone();
    tasks.critical(name, async move {
        loop {
            if let Err(error) = pass(worker.clone()).await {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, name, "pass failed, retrying");
            }
            tokio::select! {
                () = sleep(jittered(interval)) => {}
                () = now.notified() => {}
            }
        }
    });
}
