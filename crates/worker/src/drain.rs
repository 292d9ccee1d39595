//! Draining: the worker takes nothing new and waits for its runs. At the deadline it hands back
//! what may be retried, ends the rest as lost, and releases its sessions.

use std::{sync::Arc, time::Duration};

use codelia_store::{DrainedBy, Error};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::{
    core::Core,
    run::{dispatch::Dispatcher, poll::Poller},
};

/// How long runs that were ended may take to commit.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take to discard the spare sandboxes.
const SPARES_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a draining worker releases the sessions that became idle.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

/// Drains the worker before its process exits.
#[derive(Debug)]
pub(crate) struct Drainer {
    pub(crate) core: Arc<Core>,
    pub(crate) poller: Arc<Poller>,
    pub(crate) dispatcher: Arc<Dispatcher>,
}

impl Drainer {
    /// Drains and unregisters the worker. The lease keeper must keep running meanwhile.
    pub(crate) async fn drain(&self) {
        self.core.drain.shut_down();
        let Core { store, lease, .. } = &*self.core;
        let drained = store.worker_drain(lease.worker(), DrainedBy::Worker).await;
        log_failure("drain", drained.map(drop));
        self.dispatcher.forget_waiting();
        let deadline = Instant::now() + self.core.options.worker.drain_grace();
        tokio::select! {
            () = sleep_until(deadline) => {}
            () = self.core.runs.none_active() => {}
            () = self.release_repeatedly() => {}
        }
        self.end_runs().await;
        // Hands back the runs that were assigned meanwhile, then releases every session.
        if timeout(COMMIT_TIMEOUT, self.release_all()).await.is_err() {
            tracing::error!(
                sessions = self.core.sessions.count(),
                "drain timed out before all sessions were released"
            );
        }
        self.discard_spares().await;
        log_failure("count", self.core.flags.flush(store).await);
        log_failure("unregister", store.worker_leave(lease.worker(), lease.incarnation()).await);
    }

    /// Forgets all sessions and waits until their spare sandboxes are gone.
    pub(crate) async fn discard_spares(&self) {
        self.core.sessions.clear();
        if timeout(SPARES_TIMEOUT, self.core.sessions.no_spares()).await.is_err() {
            tracing::error!("drain timed out before all spare sandboxes were discarded");
        }
    }

    /// Sessions become idle one by one.
    async fn release_repeatedly(&self) {
        loop {
            log_failure("release sessions", self.poller.run_once().await);
            sleep(RELEASE_INTERVAL).await;
        }
    }

    /// Releases until nothing is held: the store may assign a run until its session is released.
    async fn release_all(&self) {
        loop {
            log_failure("release sessions", self.poller.run_once().await);
            if self.core.sessions.count() == 0 || !self.core.lease.is_live() {
                return;
            }
            sleep(RELEASE_INTERVAL).await;
        }
    }

    async fn end_runs(&self) {
        let kill_grace = self.core.options.kill_grace;
        let running = self.core.runs.all_active();
        if !running.is_empty() {
            tracing::warn!(runs = running.len(), "drain deadline, ending the runs that are left");
        }
        for run in running {
            if run.cancel.is_cancelled() {
                run.cancel_within(Some(kill_grace));
            }
            run.drain_deadline.cancel();
        }
        if timeout(kill_grace + COMMIT_TIMEOUT, self.core.runs.none_active()).await.is_err() {
            tracing::error!(
                runs = self.core.runs.all_active().len(),
                "drain timed out before all runs ended"
            );
        }
    }
}

fn log_failure(step: &'static str, result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, step, "drain step failed");
    }
}
