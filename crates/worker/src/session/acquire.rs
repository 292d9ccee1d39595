//! Acquires and releases session leases.

use std::{collections::HashSet, io, sync::Arc};

use codelia_policy::Ids;
use codelia_store::{ChangesDecision, Error, HeldChanges, Lease, ReleaseOutcome};
use codelia_telemetry::{metrics, task};
use codelia_types::{ChangesState, LeaseEpoch, LostReason, RunId, SessionId};
use futures::{TryStreamExt, stream};
use tokio::time::Instant;

use super::{
    spare_maker,
    table::{Hold, Holding},
};
use crate::{
    core::Core,
    fault,
    file_work::blocking,
    lease::worker_lease::WorkerLease,
    sandbox::canary,
    workspace::{root::RootError, transaction::Transaction},
};

/// Sessions that are released concurrently.
const MAX_CONCURRENT_RELEASES: usize = 8;

/// Acquires and releases the leases of sessions for this worker.
#[derive(Debug, Clone)]
pub(crate) struct SessionLeases {
    pub(crate) core: Arc<Core>,
}

impl SessionLeases {
    /// Acquires a session if possible and prepares for its first run. Returns the epoch if the
    /// worker holds the session now. `is_new` says that probably nobody has held the session yet.
    pub(crate) async fn acquire(
        &self,
        id: SessionId,
        is_new: bool,
    ) -> Result<Option<LeaseEpoch>, Error> {
        let current = self.core.lease.current();
        if let Holding::Held { epoch, closing: false } = self.core.sessions.holding(id) {
            // The offer says that it has queued runs, such as one that waited for an approval.
            self.core.sessions.queued.mark(id);
            self.core.wakeups.poll.notify_one();
            return Ok(Some(epoch));
        }
        // Sessions that have their files here can be taken to remove some.
        if is_new && self.core.space.is_short() {
            return Ok(None);
        }
        if self.core.drain.is_draining()
            || !current.is_live()
            || !self.core.sessions.begin_acquire(id)
        {
            return Ok(None);
        }
        let answer = self.acquire_in_store(id, &current, is_new).await;
        let Ok(Some(lease)) = answer else {
            // A failed call may still have been stored; the poll or a file call finds out.
            if answer.is_err() {
                self.core.sessions.queued.mark(id);
            }
            self.core.sessions.forget(id);
            return answer.map(|_| None);
        };
        metrics().runs_retried(lease.retried);
        metrics().runs_lost(LostReason::WorkerLost.as_str(), lease.lost);
        if current.fence.is_cancelled() {
            self.core.sessions.forget(id);
            return Ok(None);
        }
        self.open(&current, lease).await
    }

    async fn acquire_in_store(
        &self,
        id: SessionId,
        current: &WorkerLease,
        is_new: bool,
    ) -> Result<Option<Lease>, Error> {
        let worker = self.core.lease.worker();
        let incarnation = current.incarnation;
        if is_new
            && let Some(lease) =
                self.core.store.lease_acquire_first(id, worker, incarnation).await?
        {
            return Ok(Some(lease));
        }
        self.core.store.lease_acquire(id, worker, incarnation).await
    }

    /// Opens the directory of a session whose lease was just acquired.
    async fn open(&self, current: &WorkerLease, lease: Lease) -> Result<Option<LeaseEpoch>, Error> {
        let id = lease.session;
        let epoch = lease.token.epoch;
        let opened = match self.finish_transactions(&lease).await {
            Ok(hold) => self.directory(&lease).await.map(|ids| ids.map(|ids| (ids, hold))),
            Err(error) => Err(error),
        };
        match opened {
            Ok(None) => {
                tracing::error!(session = %id, "session files are lost, ending the session");
                let ended = self.core.store.session_end_data_lost(id, &lease.token).await;
                // If that was not stored, the poll releases it and the next holder ends it.
                self.core.sessions.forget(id);
                self.core.sessions.queued.mark(id);
                self.core.wakeups.upkeep.notify_one();
                ended.map(|()| None)
            }
            Ok(Some(_)) if current.fence.is_cancelled() => {
                self.core.sessions.forget(id);
                Ok(None)
            }
            Ok(Some((ids, hold))) => {
                let has_queue = lease.has_queue;
                self.core.sessions.acquired(lease, ids, hold);
                spare_maker::refill(&self.core, id);
                if has_queue {
                    self.core.wakeups.poll.notify_one();
                }
                Ok(Some(epoch))
            }
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    session = %id,
                    "cannot open session directory"
                );
                let released = self.core.store.lease_release(id, &lease.token).await;
                // If that failed, the poll or a file call finds the lease in the store and releases
                // it.
                self.core.sessions.forget(id);
                self.core.sessions.queued.mark(id);
                released.map(|_| None)
            }
        }
    }

    /// Releases the sessions that are not busy here.
    pub(crate) async fn release_idle(&self, busy: &HashSet<SessionId>) -> Result<(), Error> {
        let current = self.core.lease.current();
        let idle = self.core.sessions.all().into_iter().filter(|id| !busy.contains(id)).map(Ok);
        stream::iter(idle)
            .try_for_each_concurrent(MAX_CONCURRENT_RELEASES, |id| self.release_held(&current, id))
            .await
    }

    /// Releases the sessions whose release failed during a drain that was taken back since.
    pub(crate) async fn finish_releases(&self) -> Result<(), Error> {
        let current = self.core.lease.current();
        stream::iter(self.core.sessions.releasing().into_iter().map(Ok))
            .try_for_each_concurrent(MAX_CONCURRENT_RELEASES, |id| self.release_held(&current, id))
            .await
    }

    /// Nothing of the session starts from here on. A run that the store has assigned to this worker
    /// keeps the session busy until it is committed or handed back.
    async fn release_held(&self, current: &WorkerLease, id: SessionId) -> Result<(), Error> {
        let Some(epoch) = self.core.sessions.begin_release(id) else { return Ok(()) };
        if self.release(current, id, epoch).await? != ReleaseOutcome::Busy {
            self.core.sessions.forget(id);
        }
        Ok(())
    }

    /// Releases one session lease in the store.
    pub(crate) async fn release(
        &self,
        current: &WorkerLease,
        id: SessionId,
        epoch: LeaseEpoch,
    ) -> Result<ReleaseOutcome, Error> {
        self.core.store.lease_release(id, &self.core.lease.token(current.incarnation, epoch)).await
    }

    /// Takes over or releases the lease of a session that this worker does not know, if the store
    /// has it: the answer to its acquisition was lost. The poll does this for sessions with runs.
    pub(crate) async fn recover_unknown(
        &self,
        id: SessionId,
        epoch: LeaseEpoch,
    ) -> Result<(), Error> {
        if self.core.sessions.holding(id) != Holding::NotHeld {
            return Ok(());
        }
        let this = self.clone();
        // In a task: a caller that gives up must not leave the session marked as being acquired.
        let recover = async move { this.take_over_or_release(id, epoch).await };
        // After a panic, which is logged, the session is not held.
        task::background("session recovery", recover).await.unwrap_or(Ok(()))
    }

    async fn take_over_or_release(&self, id: SessionId, epoch: LeaseEpoch) -> Result<(), Error> {
        let current = self.core.lease.current();
        if !current.is_live() || !self.core.sessions.begin_acquire(id) {
            return Ok(());
        }
        let token = self.core.lease.token(current.incarnation, epoch);
        match self.core.store.lease_get_first(id, &token).await {
            // The next holder would expect files, since a file call was made, and there are none
            // yet.
            Ok(Some(lease)) => self.open(&current, lease).await.map(drop),
            Ok(None) => {
                let released = self.release(&current, id, epoch).await;
                self.core.sessions.forget(id);
                released.map(drop)
            }
            Err(error) => {
                self.core.sessions.forget(id);
                Err(error)
            }
        }
    }

    /// Finishes the transactional runs that an earlier holder of the session did not: applies
    /// changes whose row says so and drops all others, except those that wait for a decision. Their
    /// row cannot change any more: this worker has taken the lease.
    async fn finish_transactions(&self, lease: &Lease) -> Result<Option<Hold>, RootError> {
        let id = lease.session;
        let root = self.core.root.clone();
        let limits = lease.spec.limits.disk();
        let open = move || root.open_session(id, limits).and_then(|()| root.transactions(id));
        let found = blocking(open).await?;
        let mut hold = None;
        for transaction in found {
            let state = self.decided(lease, &transaction).await?;
            if let (ChangesState::Held, Some(held)) = (state, lease.held) {
                tracing::info!(session = %id, run = %transaction.run, "changes wait for a decision");
                hold = Some(Hold {
                    run: held.run,
                    epoch: held.epoch,
                    until: Instant::now() + held.remaining,
                });
                continue;
            }
            let is_applied = state == ChangesState::Applied;
            tracing::info!(session = %id, run = %transaction.run, is_applied, "finishing transactional run");
            let root = self.core.root.clone();
            fault::point("recover");
            blocking(move || root.finish_transaction(&transaction, is_applied)).await?;
            fault::point("recovered");
        }
        if let (Some(held), None) = (lease.held, hold) {
            // They expired, or are on a root that is gone.
            self.drop_held(lease, held.run).await?;
        }
        Ok(hold)
    }

    /// Decides what is to become of changes that an earlier holder left.
    async fn decided(&self, lease: &Lease, found: &Transaction) -> Result<ChangesState, RootError> {
        if !found.is_prepared().map_err(RootError::interrupted)? {
            return Ok(ChangesState::Dropped);
        }
        let is_held = |held: &HeldChanges| (held.run, held.epoch) == (found.run, found.epoch);
        if let Some(held) = lease.held.as_ref().filter(|held| is_held(held)) {
            if !held.remaining.is_zero() {
                return Ok(ChangesState::Held);
            }
            return self.drop_held(lease, held.run).await;
        }
        let read = self.core.store.run_changes_state_any_tenant(found.run, found.epoch).await;
        match read.map_err(unknown)? {
            Some(ChangesState::Applied) => Ok(ChangesState::Applied),
            // Without its row in the table of held changes nobody can decide about them any more.
            Some(ChangesState::Dropped | ChangesState::Held) | None => Ok(ChangesState::Dropped),
        }
    }

    /// Records that held changes are dropped, and returns what became of them.
    async fn drop_held(&self, lease: &Lease, run: RunId) -> Result<ChangesState, RootError> {
        let decision = ChangesDecision { session: lease.session, run, apply: false, key: None };
        let decided =
            self.core.store.changes_decide(decision, &lease.token).await.map_err(unknown)?;
        Ok(decided.unwrap_or(ChangesState::Dropped))
    }

    /// Creates a session's directory if needed and returns its owner; `None` if the session had
    /// files and they are lost.
    async fn directory(&self, lease: &Lease) -> Result<Option<Ids>, RootError> {
        let core = self.core.clone();
        let id = lease.session;
        let has_files = lease.has_files;
        let mode = lease.spec.mode;
        let limits = lease.spec.limits.disk();
        let open = move || {
            let Core { root, disk, backends, sessions, .. } = &*core;
            if has_files && !root.has_session(id)? {
                return Ok(None);
            }
            let (_, ids) = root.create_session(id)?;
            let workspace = root.session(id);
            disk.attach(id, mode, ids, limits)
                .map_err(RootError::at("set the disk limits of", &workspace))?;
            if let Some(canaries) = backends.canaries().filter(|_| canary::has_canaries(mode)) {
                canaries.plant(id, &workspace, &**sessions).map_err(RootError::interrupted)?;
            }
            Ok(Some(ids))
        };
        blocking(open).await
    }
}

/// The store did not say what is to become of changes.
fn unknown(error: Error) -> RootError {
    RootError::interrupted(io::Error::other(error))
}
