//! The poll: finds runs and sessions in the store that no push announced. Idempotent: each pass
//! reads the store again.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_proto::internal::v1::PushResult;
use codelia_store::{AssignedRun, Error, HeldSessions, RunRef, SessionRef};
use codelia_types::{Incarnation, RunId, SessionId, TenantId};
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use time::OffsetDateTime;

use super::{
    dispatch::Dispatcher,
    registry::{PriorOutcome, RunSource, RunStatus},
};
use crate::{
    core::Core,
    lease::worker_lease::WorkerLease,
    session::{acquire::SessionLeases, queue::DueSessions, table::Holding},
};

/// Queued runs read in one pass: as many as can wait in this worker.
const MAX_QUEUED: i64 = 16 * 1024;
/// Time between two polls that read all assigned runs.
const READ_ALL_INTERVAL: Duration = Duration::from_secs(30);
/// How long before the last poll a run may have been made that it did not see: the time of an
/// insert and the difference of two clocks.
const READ_AGAIN: Duration = Duration::from_secs(30);
/// Sessions that are acquired concurrently.
const MAX_CONCURRENT_ACQUIRES: usize = 8;

/// Compares the store with what this worker knows.
#[derive(Debug)]
pub(crate) struct Poller {
    pub(crate) core: Arc<Core>,
    pub(crate) leases: SessionLeases,
    pub(crate) dispatcher: Arc<Dispatcher>,
    pub(crate) last: Mutex<Option<LastPoll>>,
}

/// The last polls of an incarnation that read its assigned runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastPoll {
    incarnation: Incarnation,
    began: OffsetDateTime,
    read_all: Instant,
}

impl Poller {
    /// Makes one pass.
    pub(crate) async fn run_once(&self) -> Result<(), Error> {
        let current = self.core.lease.current();
        if !current.is_live() {
            return Ok(());
        }
        for assigned in self.list_assigned(current.incarnation).await? {
            self.take_assigned(&current, assigned).await;
        }
        if self.core.drain.is_draining() {
            self.dispatcher.forget_waiting();
            self.core.sessions.queued.read_all_next();
            let active = self.core.runs.all_active();
            let busy = active.iter().map(|run| run.assigned.session).collect();
            return self.leases.release_idle(&busy).await;
        }
        log_failure(self.leases.finish_releases().await);
        for (run, session, tenant) in self.list_queued(current.incarnation).await? {
            self.take_queued(&current, run, session, &tenant).await?;
        }
        self.acquire_wanted(&current).await
    }

    /// Lists the runs that are assigned to this incarnation. Most polls read only those made since
    /// the last poll and those that the worker executes. The others are runs that the worker began
    /// without receiving the answer; a poll that reads all finds them.
    async fn list_assigned(&self, incarnation: Incarnation) -> Result<Vec<AssignedRun>, Error> {
        let worker = self.core.lease.worker();
        let began = OffsetDateTime::now_utc();
        let now = Instant::now();
        let last = *self.last.lock();
        let recent = |last: &LastPoll| {
            last.incarnation == incarnation
                && now.duration_since(last.read_all) < READ_ALL_INTERVAL
                && !self.core.drain.is_draining()
        };
        let (assigned, read_all) = match last.filter(recent) {
            Some(last) => {
                let known: Vec<RunId> =
                    self.core.runs.all_active().iter().map(|run| run.assigned.id).collect();
                let since = last.began - READ_AGAIN;
                let store = &self.core.store;
                let assigned =
                    store.run_list_assigned_since(worker, incarnation, since, &known).await?;
                (assigned, last.read_all)
            }
            None => (self.core.store.run_list_assigned(worker, incarnation).await?, now),
        };
        let last = LastPoll { incarnation, began, read_all };
        *self.last.lock() = Some(last);
        Ok(assigned)
    }

    /// Lists the queued runs of held sessions that may have some, see [`DueSessions`].
    async fn list_queued(
        &self,
        incarnation: Incarnation,
    ) -> Result<Vec<(RunId, SessionId, TenantId)>, Error> {
        let queued = &self.core.sessions.queued;
        let began = tokio::time::Instant::now();
        let due = queued.take_due(incarnation);
        let sessions = match &due {
            DueSessions::Marked(ids) if ids.is_empty() => return Ok(Vec::new()),
            DueSessions::Marked(ids) => HeldSessions::Among(ids),
            DueSessions::All => HeldSessions::All,
        };
        let Core { store, lease, .. } = &*self.core;
        let found = store.run_list_queued(lease.worker(), incarnation, sessions, MAX_QUEUED).await;
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                queued.not_read(due);
                return Err(error);
            }
        };
        // Before anything else fails: these stay queued until they begin.
        for (_, session, _) in &found {
            queued.mark(*session);
        }
        if found.len() >= usize::try_from(MAX_QUEUED).unwrap_or(usize::MAX) {
            queued.not_read(due);
        } else if due == DueSessions::All {
            queued.all_read(incarnation, began);
        }
        Ok(found)
    }

    /// Takes a run that the store has assigned to this incarnation: its push was lost, or a caller
    /// asked to cancel it.
    async fn take_assigned(&self, current: &WorkerLease, assigned: AssignedRun) {
        match self.core.runs.status(assigned.id, current.incarnation) {
            RunStatus::Active(run) if assigned.cancel_requested => {
                return run.cancel_within(assigned.cancel_grace);
            }
            RunStatus::Unknown | RunStatus::Prior(PriorOutcome::Left) => {}
            RunStatus::Prior(PriorOutcome::Ended) => {
                return self.core.runs.remember(assigned.id, current.incarnation);
            }
            RunStatus::Active(_)
            | RunStatus::Waiting
            | RunStatus::Prior(PriorOutcome::HandedBack) => return,
        }
        if self.core.sessions.holding(assigned.session) == Holding::Acquiring
            && !self.core.drain.is_draining()
        {
            return;
        }
        let AssignedRun { id, session, epoch, turn, .. } = assigned;
        let tenant = assigned.tenant.clone();
        if self.dispatcher.assign(current, assigned, RunSource::Assigned) != PushResult::Rejected
            || !self
                .dispatcher
                .hand_back(current, RunRef { id, session, tenant: &tenant }, turn)
                .await
        {
            return;
        }
        if self.core.sessions.holding(session) == Holding::NotHeld {
            // The store says that this worker holds the session: the answer to an acquisition was
            // lost. Release it and start over.
            log_failure(self.leases.release(current, session, epoch).await.map(drop));
        }
    }

    async fn take_queued(
        &self,
        current: &WorkerLease,
        run: RunId,
        session: SessionId,
        tenant: &TenantId,
    ) -> Result<(), Error> {
        match self.core.sessions.holding(session) {
            Holding::Held { .. } => {
                self.dispatcher.enqueue(current.incarnation, run, session, tenant)
            }
            Holding::Acquiring | Holding::Releasing => {}
            Holding::NotHeld => {
                // As above: release a lease that only the store knows.
                let found = self.core.store.session_get(tenant, &SessionRef::Id(session)).await?;
                let is_ours = |holder: Option<&_>| holder == Some(self.core.lease.worker());
                if let Some(found) = found.filter(|found| is_ours(found.holder.as_ref())) {
                    self.leases.release(current, session, found.lease_epoch).await?;
                }
            }
        }
        Ok(())
    }

    /// Acquires sessions that have queued runs and no holder, while slots are free.
    async fn acquire_wanted(&self, current: &WorkerLease) -> Result<(), Error> {
        let free = i64::try_from(self.core.slots.lock().free()).unwrap_or(i64::MAX);
        if free == 0 {
            return Ok(());
        }
        let Core { store, lease, .. } = &*self.core;
        let wanted = store.lease_list_wanted(lease.worker(), current.incarnation, free).await?;
        for id in wanted.held {
            if self.core.sessions.queued.mark(id) {
                self.core.wakeups.poll.notify_one();
            }
        }
        stream::iter(wanted.free)
            .for_each_concurrent(MAX_CONCURRENT_ACQUIRES, |id| async move {
                if let Holding::Held { .. } = self.core.sessions.holding(id) {
                    // The store says that no live worker holds it, so this one does not either.
                    self.core.sessions.forget(id);
                }
                log_failure(self.leases.acquire(id, false).await.map(drop));
            })
            .await;
        Ok(())
    }
}

fn log_failure(result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(%error, "poll step failed, the next pass retries it");
    }
}
