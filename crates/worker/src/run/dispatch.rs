//! Gives a run that is assigned to this worker a slot: right away, or through the fair queue.

use std::{sync::Arc, time::Duration};

use codelia_proto::internal::v1::PushResult;
use codelia_store::{AssignedRun, RunRef};
use codelia_telemetry::{Step, backoff::jittered, metrics, task, trace};
use codelia_types::{Incarnation, RunId, SessionId, TenantId};
use tokio::time::{Instant, sleep};
use tracing::Instrument;

use super::{
    active::{ActiveRun, InputReceivers},
    executor::Executor,
    registry::{RunSource, RunStatus},
};
use crate::{
    core::Core, lease::worker_lease::WorkerLease, session::table::Holding, slots::WaitingRun,
};

/// Between two attempts to hand a run back.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// The right to run one command; returned when dropped.
#[derive(Debug)]
struct Slot {
    dispatcher: Arc<Dispatcher>,
    tenant: TenantId,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.dispatcher.core.slots.lock().release(&self.tenant);
        self.dispatcher.fill_slots();
    }
}

/// Starts runs, lets them wait for a slot, or hands them back.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    pub(crate) core: Arc<Core>,
    pub(crate) executor: Executor,
}

impl Dispatcher {
    /// Takes a run that the store has assigned to this incarnation, unless the worker already has
    /// it. Returns before the command is launched.
    pub(crate) fn assign(
        self: &Arc<Self>,
        current: &WorkerLease,
        mut assigned: AssignedRun,
        source: RunSource,
    ) -> PushResult {
        let closing = match self.core.sessions.holding(assigned.session) {
            Holding::Held { epoch, closing } if epoch == assigned.epoch => closing,
            Holding::Held { .. } | Holding::Acquiring | Holding::Releasing | Holding::NotHeld => {
                return PushResult::Rejected;
            }
        };
        match self.core.runs.claim(assigned.id, current.incarnation, source) {
            Ok(()) => {}
            Err(RunStatus::Active(_)) => return PushResult::Started,
            Err(RunStatus::Waiting) => return PushResult::Queued,
            Err(RunStatus::Prior(_) | RunStatus::Unknown) => return PushResult::Rejected,
        }
        assigned.cancel_requested |= closing;
        if assigned.cancel_requested {
            // The run ends before its command starts, so it needs no slot.
            self.start(current, assigned, None, None);
            return PushResult::Started;
        }
        if self.core.drain.is_draining() {
            let dispatcher = self.clone();
            let current = current.clone();
            task::background("hand back", async move {
                dispatcher.hand_back(&current, assigned.names(), assigned.turn).await
            });
            return PushResult::Rejected;
        }
        if self.core.slots.lock().try_take(&assigned.tenant) {
            let slot = Slot { dispatcher: self.clone(), tenant: assigned.tenant.clone() };
            self.start(current, assigned, Some(slot), None);
            return PushResult::Started;
        }
        task::background("queue", self.clone().hand_back_and_enqueue(current.clone(), assigned));
        PushResult::Queued
    }

    /// Lets a run that the store has as queued wait for a slot here.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        incarnation: Incarnation,
        run: RunId,
        session: SessionId,
        tenant: &TenantId,
    ) {
        if self.core.runs.claim(run, incarnation, RunSource::Queued).is_err() {
            return;
        }
        let waiting = WaitingRun { run, session, since: Instant::now() };
        let joined = self.core.slots.lock().wait(tenant, waiting);
        match joined {
            Ok(()) => self.fill_slots(),
            Err(_full) => self.core.runs.handed_back(run, incarnation),
        }
    }

    /// Hands back a run that did not begin; `true` if it is queued now. Retries until the store
    /// answers or the lease is lost: before that the state of the run is unknown.
    pub(crate) async fn hand_back(
        &self,
        current: &WorkerLease,
        run: RunRef<'_>,
        turn: i32,
    ) -> bool {
        let Core { store, lease, .. } = &*self.core;
        let incarnation = current.incarnation;
        while !current.fence.is_cancelled() {
            match store.run_hand_back(run, turn, lease.worker(), incarnation).await {
                Ok(is_queued) => {
                    self.core.runs.handed_back(run.id, incarnation);
                    self.core.sessions.queued.mark(run.session);
                    return is_queued;
                }
                Err(error) => {
                    tracing::warn!(%error, run = %run.id, "cannot hand back run, retrying")
                }
            }
            sleep(jittered(RETRY_DELAY)).await;
        }
        // The next incarnation may find it in the store again.
        self.core.runs.leave(run.id, incarnation);
        false
    }

    /// Forgets the runs that wait for a slot: the store has them as queued.
    pub(crate) fn forget_waiting(&self) {
        let waiting = self.core.slots.lock().clear_waiting();
        let incarnation = self.core.lease.incarnation();
        for waiting in waiting {
            self.core.runs.leave(waiting.run, incarnation);
        }
    }

    async fn hand_back_and_enqueue(self: Arc<Self>, current: WorkerLease, run: AssignedRun) {
        if self.hand_back(&current, run.names(), run.turn).await {
            self.enqueue(current.incarnation, run.id, run.session, &run.tenant);
        }
    }

    /// Gives free slots to waiting runs.
    fn fill_slots(self: &Arc<Self>) {
        loop {
            let next = self.core.slots.lock().next();
            let Some((tenant, waiting)) = next else { return };
            let slot = Slot { dispatcher: self.clone(), tenant };
            // Without a parent: otherwise each span would be nested in that of the run before it.
            let span = tracing::info_span!(parent: None, "begin");
            task::background("begin", self.clone().begin(waiting, slot).instrument(span));
        }
    }

    /// Begins a queued run, if the worker still holds its session.
    async fn begin(self: Arc<Self>, waiting: WaitingRun, slot: Slot) {
        let current = self.core.lease.current();
        let epoch = match self.core.sessions.holding(waiting.session) {
            Holding::Held { epoch, .. } if current.is_live() => epoch,
            _ => return self.leave(&waiting, &current),
        };
        let token = self.core.lease.token(current.incarnation, epoch);
        match self.core.store.run_begin(waiting.run, &token).await {
            Ok(Some(assigned)) => {
                self.start(&current, assigned, Some(slot), Some(waiting.since));
            }
            Ok(None) => self.leave(&waiting, &current),
            Err(error) => {
                tracing::warn!(%error, run = %waiting.run, "cannot begin queued run, leaving it to the poll");
                self.leave(&waiting, &current);
            }
        }
    }

    /// Leaves a run to the poll.
    fn leave(&self, waiting: &WaitingRun, current: &WorkerLease) {
        self.core.runs.leave(waiting.run, current.incarnation);
        self.core.sessions.queued.mark(waiting.session);
    }

    fn start(
        self: &Arc<Self>,
        current: &WorkerLease,
        assigned: AssignedRun,
        slot: Option<Slot>,
        queued_at: Option<Instant>,
    ) {
        let span = tracing::info_span!(
            "run",
            run = %assigned.id,
            session = %assigned.session,
            tenant = %assigned.tenant,
            attempt = assigned.attempt,
        );
        trace::continue_from(&span, assigned.traceparent.as_deref());
        trace::attribute(&span, "mode", assigned.spec.mode.as_str());
        if let Some(at) = queued_at {
            span.in_scope(|| metrics().step(Step::Queue, at.elapsed()));
        }
        let lease = self.core.lease.token(current.incarnation, assigned.epoch);
        let (run, inputs) = ActiveRun::new(assigned, lease, &current.fence);
        self.core.runs.activate(run.clone());
        task::background("run", self.clone().execute(run, inputs, slot).instrument(span));
    }

    /// Executes a run. Its slot is free again when its sandbox is gone, before the result is
    /// committed.
    async fn execute(
        self: Arc<Self>,
        run: Arc<ActiveRun>,
        inputs: InputReceivers,
        slot: Option<Slot>,
    ) {
        // Until the run is concluded: its changes are applied then.
        let (result, _use) = match self.executor.enter_workspace(&run).await {
            Ok(use_of_workspace) => (self.executor.execute(&run, inputs).await, use_of_workspace),
            Err(denial) => (Ok(denial.into()), None),
        };
        let result = self.executor.settle_changes(&run, result).await;
        run.output.close();
        drop(slot);
        if self.executor.conclude(&run, result).await {
            self.hand_back(&self.core.lease.current(), run.assigned.names(), run.assigned.turn)
                .await;
        }
    }
}
