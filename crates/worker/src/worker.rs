//! What the parts of a worker share.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use codelia_store::{Error, EventBody, EventKind, EventSubject, Heartbeat, NewWorker, Store};
use codelia_types::{Incarnation, LeaseEpoch, LeaseToken, RunId, SessionId, WorkerId};
use serde_json::json;
use tokio::{
    sync::{Notify, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use crate::{
    Options,
    lease::keeper::{Current, Holder},
    lease::sessions::{Holding, Sessions},
    run::dispatch::Waiting,
    run::execute::Undone,
    run::slots::Slots,
    run::table::{ActiveRun, Runs},
    sandbox::backends::Modes,
    sandbox::receipts::Receipts,
    workspace::removal_backoff::Retries,
    workspace::root::Root,
};

/// Runs that wait for a slot here; more wait in the store alone.
const MAX_WAITING: usize = 16 * 1024;
/// Spare sandboxes beside two for each slot.
const EXTRA_SPARES: usize = 64;
/// Fenced sandboxes are killed at once; one that takes longer cannot be killed.
const FENCE_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) options: Options,
    pub(crate) store: Store,
    pub(crate) modes: Modes,
    pub(crate) root: Root,
    pub(crate) sessions: Sessions,
    pub(crate) runs: Runs,
    pub(crate) receipts: Arc<Receipts>,
    pub(crate) current: watch::Sender<Current>,
    /// Wakes the poll.
    pub(crate) poll_now: Notify,
    /// Wakes the janitor.
    pub(crate) clean_now: Notify,
    /// The worker is about to leave.
    pub(crate) leaving: CancellationToken,
    slots: Mutex<Slots<Waiting>>,
    operator_drains: AtomicBool,
    /// Session directories that could not be removed.
    pub(crate) removals: Retries,
    /// A life was lost and nobody was told yet.
    was_fenced: AtomicBool,
    /// As it registers, but for the incarnation.
    card: NewWorker,
}

impl Worker {
    pub(crate) fn new(
        options: Options,
        store: Store,
        modes: Modes,
        root: Root,
        address: String,
    ) -> Arc<Self> {
        let card = NewWorker {
            id: options.id.clone(),
            incarnation: Incarnation::generate(),
            previous: None,
            root_id: root.id,
            address,
            modes: modes.names(),
            slots: i32::try_from(options.slots).unwrap_or(i32::MAX),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            lease_ttl: options.lease_ttl,
        };
        let receipts = Arc::<Receipts>::default();
        Arc::new(Self {
            sessions: Sessions::new(options.slots * 2 + EXTRA_SPARES, receipts.clone()),
            receipts,
            runs: Runs::new(),
            current: watch::Sender::new(Current::none()),
            poll_now: Notify::new(),
            clean_now: Notify::new(),
            leaving: CancellationToken::new(),
            slots: Mutex::new(Slots::new(options.slots, MAX_WAITING)),
            operator_drains: AtomicBool::new(false),
            removals: Retries::default(),
            was_fenced: AtomicBool::new(false),
            options,
            store,
            modes,
            root,
            card,
        })
    }

    pub(crate) fn id(&self) -> &WorkerId {
        &self.options.id
    }

    /// The token of a lease that this worker holds.
    pub(crate) fn lease_token(&self, incarnation: Incarnation, epoch: LeaseEpoch) -> LeaseToken {
        LeaseToken { worker: self.id().clone(), incarnation, epoch }
    }

    pub(crate) fn address(&self) -> &str {
        &self.card.address
    }

    pub(crate) fn current(&self) -> Current {
        self.current.borrow().clone()
    }

    /// Whether it takes nothing new.
    pub(crate) fn is_draining(&self) -> bool {
        self.leaving.is_cancelled()
            || self.operator_drains.load(Ordering::Relaxed)
            || !self.receipts.are_clean()
    }

    pub(crate) fn slots(&self) -> MutexGuard<'_, Slots<Waiting>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a run's command may be started now: the lease is live and the session held.
    pub(crate) fn may_start(&self, run: &ActiveRun) -> Result<(), Undone> {
        let current = self.current.borrow();
        if run.fence.is_cancelled() || current.incarnation != run.lease.incarnation {
            return Err(Undone::Lost);
        }
        if !current.is_live() {
            // The run is dropped, so the life must be over for good: else nobody would ever end the run.
            current.fence.cancel();
            return Err(Undone::Lost);
        }
        match self.sessions.holding(run.assigned.session) {
            Holding::Held { epoch, .. } if epoch == run.assigned.epoch => Ok(()),
            Holding::Held { .. } | Holding::Changing | Holding::Not => Err(Undone::NotHeld),
        }
    }

    /// Makes sure that a session's next run finds a prepared sandbox.
    pub(crate) fn keep_spare(self: &Arc<Self>, session: SessionId) {
        // Nothing is made ahead at the expense of those who wait now.
        if self.is_draining() || self.slots().waiting() > 0 {
            return;
        }
        let Some(spec) = self.sessions.usual_run(session) else { return };
        let root = self.root.session(session);
        // A session whose usual run would be refused gets no spare; the run itself says why.
        let Some(ids) = self.sessions.ids(session) else { return };
        let Ok(plan) = self.modes.plan(RunId::generate(), session, root, &spec, ids) else { return };
        let worker = self.clone();
        self.sessions.keep_spare(session, plan, |plan| async move {
            worker.modes.prepare(&plan).await.map_err(|denial| denial.refusal)
        });
    }

    /// A run of this session is over: a session that has ended may wait for it to be removed.
    pub(crate) fn run_ended(&self, session: SessionId) {
        if let Holding::Held { closing: true, .. } = self.sessions.holding(session) {
            self.clean_now.notify_one();
        }
    }

    /// Ends a session's runs; what it holds is removed when they are gone.
    pub(crate) fn close_session(&self, session: SessionId) {
        self.sessions.close(session);
        for run in self.runs.of_session(session) {
            run.cancel.cancel();
        }
    }

    /// Leaves a trace of a life that was lost; the work goes on without it.
    async fn tell_fenced(&self) {
        let concerned = EventSubject { worker: Some(self.id().clone()), ..EventSubject::default() };
        let happening = EventBody { kind: EventKind::WorkerFenced, field: None, detail: json!({}) };
        if let Err(error) = self.store.event_insert(&concerned, &happening).await {
            tracing::warn!(%error, "an event is not recorded");
        }
    }

    /// Forgets who waits for a slot: they are queued in the store.
    pub(crate) fn forget_waiting(&self) {
        let waiting = self.slots().clear_waiting();
        let life = self.current.borrow().incarnation;
        for waiting in waiting {
            self.runs.leave(waiting.run, life);
        }
    }
}

impl Holder for Worker {
    async fn register(&self, incarnation: Incarnation) -> Result<Heartbeat, Error> {
        let before = Some(self.current.borrow().incarnation);
        let beat = self
            .store
            .worker_register(&NewWorker { incarnation, previous: before, ..self.card.clone() })
            .await?;
        if !self.receipts.are_clean() {
            self.store.worker_drain(self.id()).await?;
        }
        if self.was_fenced.swap(false, Ordering::Relaxed) {
            self.tell_fenced().await;
        }
        Ok(beat)
    }

    async fn renew(&self, incarnation: Incarnation) -> Result<Heartbeat, Error> {
        let busy = i32::try_from(self.slots().busy()).unwrap_or(i32::MAX);
        self.store.worker_renew(self.id(), incarnation, self.options.lease_ttl, busy).await
    }

    fn beat(&self, beat: Heartbeat) {
        if self.operator_drains.swap(beat.drain, Ordering::Relaxed) != beat.drain {
            tracing::info!(drain = beat.drain, "an operator's word on draining");
            self.poll_now.notify_one();
        }
    }

    async fn fence(&self) {
        self.was_fenced.store(true, Ordering::Relaxed);
        self.forget_waiting();
        self.sessions.clear();
        if timeout(FENCE_PATIENCE, self.runs.none_active()).await.is_err() {
            tracing::error!("sandboxes of a lost lease are still there");
        }
        self.sessions.clear();
    }
}
