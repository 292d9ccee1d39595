//! The poll: finds in the store what no push brought. Idempotent: it re-reads the truth each time.

use std::sync::Arc;

use codelia_store::{AssignedRun, Error, SessionRef};
use codelia_types::{RunId, SessionId, TenantId};
use futures::{StreamExt, stream};

use crate::{
    lease::acquire::{release, release_idle, take_session},
    lease::keeper::Current,
    lease::sessions::Holding,
    run::dispatch::{Taken, assign, enqueue, hand_back},
    run::table::{Known, Past, Source},
    worker::Worker,
};

/// Queued runs read at once: as many as can wait here.
const QUEUED_LIMIT: i64 = 16 * 1024;
/// Sessions taken at once.
const TAKEN_AT_ONCE: usize = 8;

/// Looks once.
pub(crate) async fn run_once(worker: &Arc<Worker>) -> Result<(), Error> {
    let current = worker.current();
    if !current.is_live() {
        return Ok(());
    }
    for assigned in worker.store.run_list_assigned(worker.id(), current.incarnation).await? {
        take_assigned(worker, &current, assigned).await;
    }
    if worker.is_draining() {
        worker.forget_waiting();
        return release_idle(worker).await;
    }
    for (run, session, tenant) in
        worker.store.run_list_queued(worker.id(), current.incarnation, QUEUED_LIMIT).await?
    {
        take_queued(worker, &current, run, session, &tenant).await?;
    }
    take_wanted(worker, &current).await
}

/// A run that is recorded for this life of the worker: its push was lost, or somebody asked for its end.
async fn take_assigned(worker: &Arc<Worker>, current: &Current, assigned: AssignedRun) {
    match worker.runs.known(assigned.id, current.incarnation) {
        Known::Active(run) if assigned.cancel_requested => return run.cancel.cancel(),
        Known::No | Known::Past(Past::Left) => {}
        Known::Past(Past::Ended) => return worker.runs.remember(assigned.id, current.incarnation),
        Known::Active(_) | Known::Waiting | Known::Past(Past::HandedBack) => return,
    }
    let changing = worker.sessions.holding(assigned.session) == Holding::Changing;
    if changing && !worker.is_draining() {
        return;
    }
    let AssignedRun { id, session, epoch, turn, .. } = assigned;
    if assign(worker, current, assigned, Source::Assigned) != Taken::Rejected
        || !hand_back(worker, current, id, turn).await
    {
        return;
    }
    if worker.sessions.holding(session) == Holding::Not {
        // The store says we hold it: an answer to an acquisition was lost. Begin anew.
        report(release(worker, current, session, epoch).await.map(drop));
    }
}

async fn take_queued(
    worker: &Arc<Worker>,
    current: &Current,
    run: RunId,
    session: SessionId,
    tenant: &TenantId,
) -> Result<(), Error> {
    match worker.sessions.holding(session) {
        Holding::Held { .. } => enqueue(worker, current.incarnation, run, session, tenant),
        Holding::Changing => {}
        Holding::Not => {
            // As above: give back what we do not know we hold.
            let found = worker.store.session_get(tenant, &SessionRef::Id(session)).await?;
            if let Some(found) = found.filter(|found| found.holder.as_ref() == Some(worker.id())) {
                release(worker, current, session, found.lease_epoch).await?;
            }
        }
    }
    Ok(())
}

/// Takes sessions that have runs and no holder, while there is room.
async fn take_wanted(worker: &Arc<Worker>, current: &Current) -> Result<(), Error> {
    let free = i64::try_from(worker.slots().free()).unwrap_or(i64::MAX);
    if free == 0 {
        return Ok(());
    }
    let wanted = worker.store.lease_list_wanted(worker.id(), current.incarnation, free).await?;
    stream::iter(wanted)
        .for_each_concurrent(TAKEN_AT_ONCE, |id| async move {
            if let Holding::Held { .. } = worker.sessions.holding(id) {
                // Nobody live holds it, so neither do we.
                worker.sessions.forget(id);
            }
            report(take_session(worker, id).await.map(drop));
        })
        .await;
    Ok(())
}

fn report(result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the poll will try again");
    }
}
