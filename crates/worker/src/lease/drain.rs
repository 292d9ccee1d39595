//! How a worker leaves: takes nothing new, lets its runs end, kills the rest, gives everything back.

use std::{sync::Arc, time::Duration};

use codelia_store::Error;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::{lease::poll, worker::Worker};

/// How long killed runs may take to be committed.
const COMMIT_PATIENCE: Duration = Duration::from_secs(5);
/// How long prepared sandboxes may take to be discarded.
const SPARES_PATIENCE: Duration = Duration::from_secs(5);
/// How often what can be given back is given back.
const RELEASE_EVERY: Duration = Duration::from_millis(200);

/// Drains and leaves. The heartbeat must go on meanwhile.
pub(crate) async fn leave(worker: &Arc<Worker>) {
    worker.leaving.cancel();
    report("drain", worker.store.worker_drain(worker.id()).await.map(drop));
    worker.forget_waiting();
    let deadline = Instant::now() + worker.options.drain_grace;
    tokio::select! {
        () = sleep_until(deadline) => {}
        () = worker.runs.none_active() => {}
        () = give_back(worker) => {}
    }
    end_runs(worker).await;
    // What was recorded for us meanwhile is handed back, and then every session.
    if timeout(COMMIT_PATIENCE, give_all_back(worker)).await.is_err() {
        tracing::error!("sessions are left that could not be given back");
    }
    worker.sessions.clear();
    if timeout(SPARES_PATIENCE, worker.sessions.no_spares()).await.is_err() {
        tracing::error!("prepared sandboxes are left that could not be discarded");
    }
    report("leave", worker.store.worker_leave(worker.id(), worker.current().incarnation).await);
}

/// Gives back again and again: sessions become free one by one.
async fn give_back(worker: &Arc<Worker>) {
    loop {
        report("give back", poll::run_once(worker).await);
        sleep(RELEASE_EVERY).await;
    }
}

/// Until nothing is held: a run may be recorded for us up to the moment its session is free.
async fn give_all_back(worker: &Arc<Worker>) {
    loop {
        report("give back", poll::run_once(worker).await);
        if worker.sessions.count() == 0 || !worker.current().is_live() {
            return;
        }
        sleep(RELEASE_EVERY).await;
    }
}

/// Kills the runs that are left; they end as canceled.
async fn end_runs(worker: &Worker) {
    for run in worker.runs.all_active() {
        run.cancel.cancel();
    }
    let patience = worker.options.kill_grace + COMMIT_PATIENCE;
    if timeout(patience, worker.runs.none_active()).await.is_err() {
        tracing::error!("runs are left that could not be ended");
    }
}

fn report(step: &'static str, result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, step, "while leaving");
    }
}
