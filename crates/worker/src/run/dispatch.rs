//! From a run that is recorded for this worker to a slot: at once, or through the fair queue.

use std::{sync::Arc, time::Duration};

use codelia_store::AssignedRun;
use codelia_telemetry::{Step, metrics, task};
use codelia_types::{Incarnation, RunId, SessionId, TenantId};
use tokio::time::{Instant, sleep};
use tracing::Instrument;

use crate::{
    lease::keeper::Current,
    lease::sessions::Holding,
    run::execute::execute,
    run::table::{ActiveRun, Known, Source},
    worker::Worker,
};

const TRY_AGAIN: Duration = Duration::from_millis(100);

/// A queued run that waits for a slot.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) run: RunId,
    session: SessionId,
    since: Instant,
}

/// The right to have a command running; given back when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    worker: Arc<Worker>,
    tenant: TenantId,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.worker.slots().release(&self.tenant);
        give_slots(&self.worker);
    }
}

/// What became of a run that is recorded for this worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Started,
    Queued,
    Rejected,
}

/// Takes a run that is recorded as running for this life of the worker, if it has not seen it.
/// Returns before the command is launched.
pub(crate) fn assign(
    worker: &Arc<Worker>,
    current: &Current,
    mut assigned: AssignedRun,
    source: Source,
) -> Taken {
    let closing = match worker.sessions.holding(assigned.session) {
        Holding::Held { epoch, closing } if epoch == assigned.epoch => closing,
        Holding::Held { .. } | Holding::Changing | Holding::Not => return Taken::Rejected,
    };
    match worker.runs.claim(assigned.id, current.incarnation, source) {
        Ok(()) => {}
        Err(Known::Active(_)) => return Taken::Started,
        Err(Known::Waiting) => return Taken::Queued,
        Err(Known::Past(_) | Known::No) => return Taken::Rejected,
    }
    assigned.cancel_requested |= closing;
    if assigned.cancel_requested {
        start(worker, current, assigned, None);
        return Taken::Started;
    }
    if worker.is_draining() {
        let (worker, current) = (worker.clone(), current.clone());
        task::background("hand back", async move {
            hand_back(&worker, &current, assigned.id, assigned.turn).await
        });
        return Taken::Rejected;
    }
    if worker.slots().try_take(&assigned.tenant) {
        let slot = Slot { worker: worker.clone(), tenant: assigned.tenant.clone() };
        start(worker, current, assigned, Some(slot));
        return Taken::Started;
    }
    task::background("queue", hand_back_and_wait(worker.clone(), current.clone(), assigned));
    Taken::Queued
}

/// Lets a run that the store has as queued wait for a slot here.
pub(crate) fn enqueue(
    worker: &Arc<Worker>,
    life: Incarnation,
    run: RunId,
    session: SessionId,
    tenant: &TenantId,
) {
    if worker.runs.claim(run, life, Source::Queued).is_ok() {
        wait(worker, life, run, session, tenant);
    }
}

/// Hands a run back that was not begun; `true` if it is queued now. Insists: until the store has
/// answered nobody can tell what the run is, and only the loss of the lease settles that otherwise.
pub(crate) async fn hand_back(worker: &Worker, current: &Current, run: RunId, turn: i32) -> bool {
    let life = current.incarnation;
    while !current.fence.is_cancelled() {
        match worker.store.run_hand_back(run, turn, worker.id(), life).await {
            Ok(is_queued) => {
                worker.runs.handed_back(run, life);
                return is_queued;
            }
            Err(error) => tracing::warn!(%error, %run, "cannot hand a run back; trying again"),
        }
        sleep(TRY_AGAIN).await;
    }
    // The next life may find it in the store again.
    worker.runs.leave(run, life);
    false
}

async fn hand_back_and_wait(worker: Arc<Worker>, current: Current, run: AssignedRun) {
    if hand_back(&worker, &current, run.id, run.turn).await {
        enqueue(&worker, current.incarnation, run.id, run.session, &run.tenant);
    }
}

/// A claimed, queued run joins the queue.
fn wait(worker: &Arc<Worker>, life: Incarnation, run: RunId, session: SessionId, tenant: &TenantId) {
    let waiting = Waiting { run, session, since: Instant::now() };
    let joined = worker.slots().wait(tenant, waiting);
    match joined {
        Ok(()) => give_slots(worker),
        Err(_full) => worker.runs.handed_back(run, life),
    }
}

/// Gives free slots to those who wait.
fn give_slots(worker: &Arc<Worker>) {
    loop {
        let next = worker.slots().next();
        let Some((tenant, waiting)) = next else { return };
        let slot = Slot { worker: worker.clone(), tenant };
        // It is no part of the run that gave its slot up: each would be inside all before it.
        let span = tracing::info_span!(parent: None, "begin");
        task::background("begin", begin(worker.clone(), waiting, slot).instrument(span));
    }
}

/// Begins a queued run, if it may still be begun.
async fn begin(worker: Arc<Worker>, waiting: Waiting, slot: Slot) {
    let current = worker.current();
    let epoch = match worker.sessions.holding(waiting.session) {
        Holding::Held { epoch, .. } if current.is_live() => epoch,
        _ => return worker.runs.leave(waiting.run, current.incarnation),
    };
    match worker.store.run_begin(waiting.run, &worker.lease_token(current.incarnation, epoch)).await {
        Ok(Some(assigned)) => {
            metrics().step(Step::Queue, waiting.since.elapsed());
            start(&worker, &current, assigned, Some(slot));
        }
        Ok(None) => worker.runs.leave(waiting.run, current.incarnation),
        Err(error) => {
            tracing::warn!(%error, run = %waiting.run, "cannot begin a queued run; left to the poll");
            worker.runs.leave(waiting.run, current.incarnation);
        }
    }
}

fn start(worker: &Arc<Worker>, current: &Current, assigned: AssignedRun, slot: Option<Slot>) {
    let span = tracing::info_span!(
        "run",
        run = %assigned.id,
        session = %assigned.session,
        tenant = %assigned.tenant,
        attempt = assigned.attempt,
    );
    let lease = worker.lease_token(current.incarnation, assigned.epoch);
    let (run, inlets) = ActiveRun::new(assigned, lease, &current.fence);
    worker.runs.activate(run.clone());
    task::background("run", execute(worker.clone(), run, inlets, slot).instrument(span));
}
