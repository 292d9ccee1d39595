//! The worker's row in the store: registers it, renews its lease, and kills all runs when the lease
//! is lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use codelia_store::{
    Error, EventBody, EventKind, EventSubject, Heartbeat, LeaseConnection, NewWorker,
};
use codelia_types::Incarnation;
use serde_json::json;
use tokio::{runtime::Handle, time::timeout};

use crate::{
    core::Core,
    lease::{keeper::LeaseClient, worker_lease::WorkerLease},
    run::dispatch::Dispatcher,
};

/// Killed sandboxes end quickly; one that takes longer cannot be killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// The lease keeper's client: acts for this worker in the store.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) core: Arc<Core>,
    pub(crate) connection: LeaseConnection,
    /// The worker's runtime, where the tasks of runs and sessions live.
    pub(crate) runtime: Handle,
    /// Record of the worker that it registers; each registration fills in its own incarnation.
    pub(crate) record: NewWorker,
    pub(crate) dispatcher: Arc<Dispatcher>,
    /// A lease was lost and its event is not recorded yet.
    pub(crate) was_fenced: AtomicBool,
}

impl Registration {
    /// Gives the lease up and asks every sandbox under it to die. Does not wait.
    pub(crate) fn fence_now(&self) {
        self.core.lease.borrow().fence.cancel();
        self.was_fenced.store(true, Ordering::Relaxed);
        self.core.runs.kill_sandboxes();
    }

    /// Their spare sandboxes are discarded on the worker's runtime.
    fn forget_sessions(&self) {
        let _runtime = self.runtime.enter();
        self.core.sessions.clear();
    }

    /// Records that a lease was lost. The worker continues if that fails.
    async fn record_fenced(&self) {
        let concerned = EventSubject {
            worker: Some(self.core.lease.worker().clone()),
            ..EventSubject::default()
        };
        let happening = EventBody { kind: EventKind::WorkerFenced, field: None, detail: json!({}) };
        if let Err(error) = self.connection.audit_insert(&concerned, &happening).await {
            tracing::warn!(%error, "cannot record the event of the lost lease");
        }
    }
}

impl LeaseClient for Registration {
    async fn register(&self, incarnation: Incarnation) -> Result<Heartbeat, Error> {
        let previous = Some(self.core.lease.incarnation());
        let worker = NewWorker { incarnation, previous, ..self.record.clone() };
        let heartbeat = self.connection.register(&worker).await?;
        if !self.core.receipts.are_clean() {
            self.connection.drain(self.core.lease.worker()).await?;
        }
        if self.was_fenced.swap(false, Ordering::Relaxed) {
            self.record_fenced().await;
        }
        Ok(heartbeat)
    }

    async fn renew(&self, incarnation: Incarnation) -> Result<Heartbeat, Error> {
        let busy = i32::try_from(self.core.slots.lock().busy()).unwrap_or(i32::MAX);
        self.connection
            .renew(self.core.lease.worker(), incarnation, self.record.lease_ttl, busy)
            .await
    }

    fn on_heartbeat(&self, heartbeat: Heartbeat, lease: &WorkerLease) {
        self.core.runs.extend_sandboxes(lease);
        if self.core.drain.set_by_operator(heartbeat.drain) {
            tracing::info!(drain = heartbeat.drain, "operator changed the drain request");
            self.core.wakeups.poll.notify_one();
        }
    }

    async fn kill_all(&self) {
        self.fence_now();
        self.dispatcher.forget_waiting();
        self.forget_sessions();
        if timeout(KILL_TIMEOUT, self.core.runs.none_active()).await.is_err() {
            tracing::error!(
                timeout_seconds = KILL_TIMEOUT.as_secs_f64(),
                "sandboxes of the lost lease are still running"
            );
        }
        // A session that was being acquired may have been added meanwhile.
        self.forget_sessions();
    }
}
