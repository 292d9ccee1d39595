//! The sessions this worker holds, with at most one spare sandbox for each that is in use.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use codelia_backends::Prepared;
use codelia_policy::{FlagRef, Ids, NetworkPolicy, Plan, RunSpec};
use codelia_store::{Lease, SessionSpec};
use codelia_types::{CommandSpec, LeaseEpoch, Mode, Refusal, RunId, SessionId, TenantId};
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, RwLock},
    time::Instant,
};

use super::queue::QueuedSessions;
use crate::{
    disk::Disk,
    sandbox::{
        canary::HeldSessions,
        spare_pool::{Spare, SparePool},
    },
};

/// A session without a run for this long keeps no spare sandbox.
const SPARE_IDLE: Duration = Duration::from_secs(60);

/// Whether this worker holds a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holding {
    NotHeld,
    /// The lease is being acquired: the answer is not known yet.
    Acquiring,
    /// The lease is being released: nothing of the session starts.
    Releasing,
    /// Held under this epoch.
    Held {
        epoch: LeaseEpoch,
        /// The session has ended: its runs are being canceled.
        closing: bool,
    },
}

#[derive(Debug)]
enum Entry {
    Acquiring,
    Held(Box<Held>),
    Releasing(LeaseEpoch),
}

/// Changes of a run that wait for a decision. Nothing may change the workspace below them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) run: RunId,
    /// The lease under which the run was executed.
    pub(crate) epoch: LeaseEpoch,
    /// When they are dropped.
    pub(crate) until: Instant,
}

#[derive(Debug)]
struct Held {
    tenant: TenantId,
    epoch: LeaseEpoch,
    spec: SessionSpec,
    /// User and group of its processes.
    ids: Ids,
    closing: bool,
    used_at: Instant,
    spare: Option<Box<Spare>>,
    hold: Option<Hold>,
}

/// All sessions of this worker.
#[derive(Debug)]
pub(crate) struct Sessions {
    table: Mutex<HashMap<SessionId, Entry>>,
    spares: SparePool,
    /// Who uses the workspaces. A lock outlives the lease: what uses it may, too.
    workspaces: Mutex<HashMap<SessionId, Weak<RwLock<()>>>>,
    /// Sessions that may have queued runs.
    pub(crate) queued: QueuedSessions,
    /// Usage of the files of the sessions.
    disk: Arc<Disk>,
}

impl Sessions {
    pub(crate) fn new(spares: SparePool, disk: Arc<Disk>) -> Self {
        Self {
            table: Mutex::default(),
            spares,
            workspaces: Mutex::default(),
            queued: QueuedSessions::default(),
            disk,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.table.lock().len()
    }

    pub(crate) fn holding(&self, id: SessionId) -> Holding {
        match self.table.lock().get(&id) {
            None => Holding::NotHeld,
            Some(Entry::Acquiring) => Holding::Acquiring,
            Some(Entry::Releasing(_)) => Holding::Releasing,
            Some(Entry::Held(held)) => Holding::Held { epoch: held.epoch, closing: held.closing },
        }
    }

    /// Marks a session as being acquired; `false` if it is already held or changing.
    pub(crate) fn begin_acquire(&self, id: SessionId) -> bool {
        let mut table = self.table.lock();
        if table.contains_key(&id) {
            return false;
        }
        table.insert(id, Entry::Acquiring);
        true
    }

    /// The lock of a session's workspace. Runs and file calls share it; a transactional run is
    /// alone, since the kernel leaves undefined what an overlay shows when the layer below changes.
    pub(crate) fn workspace(&self, id: SessionId) -> Arc<RwLock<()>> {
        let mut workspaces = self.workspaces.lock();
        if let Some(known) = workspaces.get(&id).and_then(Weak::upgrade) {
            return known;
        }
        workspaces.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(RwLock::new(()));
        workspaces.insert(id, Arc::downgrade(&lock));
        lock
    }

    /// Reads something of a held session.
    fn read<T>(&self, id: SessionId, read: impl FnOnce(&Held) -> T) -> Option<T> {
        match self.table.lock().get(&id)? {
            Entry::Held(held) => Some(read(held)),
            Entry::Acquiring | Entry::Releasing(_) => None,
        }
    }

    /// User and group of a held session's processes.
    pub(crate) fn ids(&self, id: SessionId) -> Option<Ids> {
        self.read(id, |held| held.ids)
    }

    /// The tenant of a held session, and the epoch under which it is held.
    pub(crate) fn tenant_and_epoch(&self, id: SessionId) -> Option<(TenantId, LeaseEpoch)> {
        self.read(id, |held| (held.tenant.clone(), held.epoch))
    }

    /// The spec and ids for file calls, if the session is held under this epoch and has not ended.
    pub(crate) fn for_files(&self, id: SessionId, epoch: LeaseEpoch) -> Option<(SessionSpec, Ids)> {
        self.read(id, |held| {
            let is_usable = held.epoch == epoch && !held.closing;
            is_usable.then(|| (held.spec.clone(), held.ids))
        })?
    }

    /// The changes that a held session holds. Does not change while the workspace is in use.
    pub(crate) fn hold(&self, id: SessionId) -> Option<Hold> {
        self.read(id, |held| held.hold)?
    }

    /// Sets what a session that is held under this epoch holds. The caller is alone in the
    /// workspace.
    pub(crate) fn set_hold(&self, id: SessionId, epoch: LeaseEpoch, hold: Option<Hold>) {
        if let Some(Entry::Held(held)) = self.table.lock().get_mut(&id)
            && held.epoch == epoch
        {
            held.hold = hold;
        }
    }

    /// The sessions whose held changes waited too long.
    pub(crate) fn expired_holds(&self) -> Vec<(SessionId, LeaseEpoch, RunId)> {
        let table = self.table.lock();
        let now = Instant::now();
        let expired = table.iter().filter_map(|(id, entry)| match entry {
            Entry::Held(held) if !held.closing => {
                held.hold.filter(|hold| hold.until <= now).map(|hold| (*id, held.epoch, hold.run))
            }
            Entry::Held(_) | Entry::Acquiring | Entry::Releasing(_) => None,
        });
        expired.collect()
    }

    /// Adds a session whose lease was acquired.
    pub(crate) fn acquired(&self, lease: Lease, ids: Ids, hold: Option<Hold>) {
        let id = lease.session;
        let has_queue = lease.has_queue;
        let held = Held {
            tenant: lease.tenant,
            epoch: lease.token.epoch,
            spec: lease.spec,
            ids,
            closing: false,
            used_at: Instant::now(),
            spare: None,
            hold,
        };
        self.table.lock().insert(id, Entry::Held(Box::new(held)));
        if has_queue {
            self.queued.mark(id);
        }
    }

    /// Marks a session as ended. The caller cancels its runs.
    pub(crate) fn close(&self, id: SessionId) {
        let spare = match self.table.lock().get_mut(&id) {
            Some(Entry::Held(held)) => {
                held.closing = true;
                held.spare.take()
            }
            _ => None,
        };
        self.spares.discard(spare);
    }

    /// Removes a session that this worker does not hold.
    pub(crate) fn forget(&self, id: SessionId) {
        let entry = self.table.lock().remove(&id);
        self.disk.detach(id);
        self.spares.discard(entry.and_then(Entry::into_spare));
    }

    /// Marks a held session as being released and returns its epoch.
    pub(crate) fn begin_release(&self, id: SessionId) -> Option<LeaseEpoch> {
        let (epoch, spare) = {
            let mut table = self.table.lock();
            let entry = table.get_mut(&id)?;
            let epoch = match entry {
                Entry::Acquiring => return None,
                Entry::Held(held) => held.epoch,
                Entry::Releasing(epoch) => *epoch,
            };
            (epoch, std::mem::replace(entry, Entry::Releasing(epoch)).into_spare())
        };
        self.spares.discard(spare);
        Some(epoch)
    }

    pub(crate) fn all(&self) -> Vec<SessionId> {
        self.table.lock().keys().copied().collect()
    }

    /// Sessions whose release was begun and did not succeed.
    pub(crate) fn releasing(&self) -> Vec<SessionId> {
        let table = self.table.lock();
        let releasing = table.iter().filter(|(_, entry)| matches!(entry, Entry::Releasing(_)));
        releasing.map(|(id, _)| *id).collect()
    }

    /// Removes all sessions: their leases are lost or released.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.table.lock());
        self.disk.detach_all();
        all.into_values().for_each(|entry| self.spares.discard(entry.into_spare()));
    }

    /// Waits until no spare sandbox is left.
    pub(crate) async fn no_spares(&self) {
        self.spares.empty().await;
    }

    /// Marks a session as used and takes its spare sandbox if that fits the plan.
    pub(crate) fn take_spare(&self, id: SessionId, wanted: &Plan) -> Option<Spare> {
        let mut table = self.table.lock();
        let Some(Entry::Held(held)) = table.get_mut(&id) else { return None };
        held.used_at = Instant::now();
        held.spare.take_if(|spare| spare.fits(wanted)).map(|spare| *spare)
    }

    /// The tenant and a run of this session that overrides nothing; `None` if it is not held or has
    /// ended.
    pub(crate) fn default_run_spec(&self, id: SessionId) -> Option<(TenantId, RunSpec)> {
        self.read(id, |held| {
            (!held.closing).then(|| (held.tenant.clone(), default_run_spec(&held.spec)))
        })?
    }

    /// The flag that chose the mode of a held session, and that mode.
    pub(crate) fn flag(&self, id: SessionId) -> Option<(FlagRef, Mode)> {
        self.read(id, |held| Some((held.spec.flags.mode.clone()?, held.spec.mode)))?
    }

    /// The network policy that a held session was created with.
    pub(crate) fn network(&self, id: SessionId) -> Option<NetworkPolicy> {
        self.read(id, |held| held.spec.policy.network.clone())
    }

    /// Gives a session a spare sandbox, unless it has one that fits or the pool is full.
    pub(crate) fn add_spare<F>(
        &self,
        id: SessionId,
        plan: Plan,
        descriptors: Option<OwnedSemaphorePermit>,
        prepare: impl FnOnce(Plan) -> F,
    ) where
        F: Future<Output = Result<Box<dyn Prepared>, Refusal>> + Send + 'static,
    {
        let Some(permit) = self.spares.try_reserve() else { return };
        let replaced = {
            let mut table = self.table.lock();
            let Some(Entry::Held(held)) = table.get_mut(&id) else { return };
            if held.closing || held.spare.as_deref().is_some_and(|spare| spare.fits(&plan)) {
                return;
            }
            held.spare.replace(Box::new(Spare::start(permit, descriptors, plan, prepare)))
        };
        self.spares.discard(replaced);
    }

    /// Discards spare sandboxes that are too old and those of idle sessions; all of them if memory
    /// is short.
    pub(crate) fn trim_spares(&self, memory_is_short: bool) {
        self.spares.set_memory_is_short(memory_is_short);
        // The time is read once: there may be many sessions.
        let now = Instant::now();
        let surplus = |entry: &mut Entry| {
            let Entry::Held(held) = entry else { return None };
            let is_idle = now.duration_since(held.used_at) >= SPARE_IDLE;
            held.spare.take_if(|spare| memory_is_short || is_idle || spare.is_too_old())
        };
        let discarded: Vec<_> = self.table.lock().values_mut().filter_map(surplus).collect();
        discarded.into_iter().for_each(|spare| self.spares.discard(Some(spare)));
    }
}

impl HeldSessions for Sessions {
    fn count(&self) -> usize {
        self.table.lock().len()
    }

    fn is_held(&self, id: SessionId) -> bool {
        self.holding(id) != Holding::NotHeld
    }
}

impl Entry {
    fn into_spare(self) -> Option<Box<Spare>> {
        match self {
            Self::Held(held) => held.spare,
            Self::Acquiring | Self::Releasing(_) => None,
        }
    }
}

fn default_run_spec(spec: &SessionSpec) -> RunSpec {
    RunSpec {
        command: CommandSpec::default(),
        mode: spec.mode,
        network: spec.network,
        limits: spec.limits.clone(),
        requested_limits: spec.requested_limits.clone(),
        policy: spec.policy.clone(),
        ends_with_caller: false,
        tool: None,
        transaction: None,
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{Enforceable, Limits, LimitsRequest, PlanTarget, Policy, SessionFlags};
    use codelia_types::{Incarnation, LeaseToken, Receipt};

    use super::*;
    use crate::sandbox::spare_pool::MAX_SPARE_AGE;

    const IDS: Ids = Ids { uid: 7, gid: 7 };

    fn sessions() -> Sessions {
        let disk = Disk::new(std::path::Path::new("/nonexistent"), None);
        Sessions::new(SparePool::new(1, Arc::default()), Arc::new(disk))
    }

    fn lease(epoch: i64) -> Lease {
        Lease {
            session: SessionId::generate(),
            tenant: "team".parse().unwrap(),
            token: LeaseToken {
                worker: "w".parse().unwrap(),
                incarnation: Incarnation::generate(),
                epoch: LeaseEpoch(epoch),
            },
            spec: SessionSpec {
                mode: Mode::Logical,
                limits: Limits::default(),
                requested_limits: LimitsRequest::default(),
                network: None,
                policy: Policy::default(),
                flags: SessionFlags::default(),
                scopes: codelia_policy::SessionScopes::default(),
                profile: None,
            },
            has_files: false,
            held: None,
            has_queue: true,
            retried: 0,
            lost: 0,
        }
    }

    fn held(sessions: &Sessions) -> SessionId {
        let lease = lease(3);
        let id = lease.session;
        assert!(sessions.begin_acquire(id));
        sessions.acquired(lease, IDS, None);
        id
    }

    fn plan(sessions: &Sessions, id: SessionId) -> Plan {
        let (_, spec) = sessions.default_run_spec(id).unwrap();
        Plan::logical(
            PlanTarget { sandbox: RunId::generate(), session: id, root: "/root".into() },
            &spec,
            Enforceable::default(),
        )
        .unwrap()
    }

    #[derive(Debug)]
    struct EmptySandbox;

    #[async_trait::async_trait]
    impl Prepared for EmptySandbox {
        async fn launch(
            self: Box<Self>,
            _: &CommandSpec,
            _: codelia_backends::Stdio,
        ) -> Result<codelia_backends::Launched, codelia_backends::Error> {
            Err(codelia_backends::Error::Unenforceable { field: "nothing" })
        }

        async fn discard(self: Box<Self>) -> Receipt {
            Receipt::default()
        }
    }

    async fn prepare(_: Plan) -> Result<Box<dyn Prepared>, Refusal> {
        Ok(Box::new(EmptySandbox))
    }

    #[test]
    fn session_is_not_held_until_lease_is_known() {
        let sessions = sessions();
        let lease = lease(7);
        let id = lease.session;
        assert!(sessions.begin_acquire(id));
        assert!(!sessions.begin_acquire(id), "one acquisition at a time");
        assert_eq!(sessions.holding(id), Holding::Acquiring);
        sessions.acquired(lease, IDS, None);
        assert_eq!(sessions.holding(id), Holding::Held { epoch: LeaseEpoch(7), closing: false });
        assert!(sessions.releasing().is_empty());
        assert_eq!(sessions.begin_release(id), Some(LeaseEpoch(7)));
        assert_eq!((sessions.holding(id), sessions.releasing()), (Holding::Releasing, vec![id]));
        sessions.forget(id);
        assert_eq!(sessions.holding(id), Holding::NotHeld);
    }

    #[tokio::test]
    async fn spare_serves_one_fitting_run() {
        let sessions = sessions();
        let id = held(&sessions);
        let fitting = plan(&sessions, id);
        sessions.add_spare(id, fitting.clone(), None, prepare);
        let other = Plan { limits: Limits { pids: 1, ..Limits::default() }, ..fitting.clone() };
        assert!(sessions.take_spare(id, &other).is_none());
        let spare = sessions.take_spare(id, &fitting).unwrap();
        assert!(spare.into_sandbox().await.is_some());
        assert!(sessions.take_spare(id, &fitting).is_none());
    }

    #[tokio::test]
    async fn spares_are_bounded_across_sessions() {
        let sessions = sessions();
        let (first, second) = (held(&sessions), held(&sessions));
        sessions.add_spare(first, plan(&sessions, first), None, prepare);
        sessions.add_spare(second, plan(&sessions, second), None, prepare);
        assert!(sessions.take_spare(second, &plan(&sessions, second)).is_none());
        assert!(sessions.take_spare(first, &plan(&sessions, first)).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn idle_session_loses_its_spare() {
        let sessions = sessions();
        let id = held(&sessions);
        sessions.add_spare(id, plan(&sessions, id), None, prepare);
        sessions.trim_spares(false);
        tokio::time::advance(SPARE_IDLE).await;
        sessions.trim_spares(false);
        assert!(sessions.take_spare(id, &plan(&sessions, id)).is_none());
    }

    #[tokio::test]
    async fn no_spares_while_memory_is_short() {
        let sessions = sessions();
        let id = held(&sessions);
        let fitting = plan(&sessions, id);
        sessions.add_spare(id, fitting.clone(), None, prepare);
        sessions.trim_spares(true);
        assert!(sessions.take_spare(id, &fitting).is_none());
        sessions.no_spares().await;
        sessions.add_spare(id, fitting.clone(), None, prepare);
        assert!(sessions.take_spare(id, &fitting).is_none());
        sessions.trim_spares(false);
        sessions.add_spare(id, fitting.clone(), None, prepare);
        assert!(sessions.take_spare(id, &fitting).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn old_spare_is_discarded_unused() {
        let sessions = sessions();
        let id = held(&sessions);
        let fitting = plan(&sessions, id);
        sessions.add_spare(id, fitting.clone(), None, prepare);
        tokio::time::advance(MAX_SPARE_AGE).await;
        assert!(sessions.take_spare(id, &fitting).is_none());
        sessions.trim_spares(false);
        assert!(
            matches!(sessions.table.lock().get(&id), Some(Entry::Held(held)) if held.spare.is_none())
        );
    }

    #[tokio::test]
    async fn closing_session_gets_no_spare() {
        let sessions = sessions();
        let id = held(&sessions);
        let fitting = plan(&sessions, id);
        sessions.close(id);
        sessions.add_spare(id, fitting.clone(), None, prepare);
        assert!(sessions.take_spare(id, &fitting).is_none());
        assert!(sessions.default_run_spec(id).is_none());
    }
}
