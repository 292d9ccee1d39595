//! The sessions this worker holds, and at most one spare sandbox for each that is in use.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use codelia_backends::Prepared;
use codelia_policy::{Ids, Plan, RunSpec};
use codelia_store::{Lease, SessionSpec};
use codelia_telemetry::task;
use codelia_types::{LeaseEpoch, Refusal, SessionId};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinHandle,
    time::Instant,
};

use crate::{sandbox::backends::serves, sandbox::receipts::Receipts};

/// A session that had no run for this long keeps no spare sandbox.
const SPARE_IDLE: Duration = Duration::from_secs(60);
/// A spare sandbox that is older is not used any more: what it was made from may have changed.
const SPARE_AGE: Duration = Duration::from_secs(600);

/// Whether and how this worker holds a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holding {
    /// It does not.
    Not,
    /// Its lease is being taken or given back: nobody can tell yet.
    Changing,
    /// It does, under this epoch.
    Held {
        epoch: LeaseEpoch,
        /// The session has ended: its runs are to be canceled.
        closing: bool,
    },
}

/// A sandbox that waits, or is being made, for a session's next run.
#[derive(Debug)]
pub(crate) struct Spare {
    plan: Plan,
    made_at: Instant,
    making: JoinHandle<Result<Box<dyn Prepared>, Refusal>>,
    _permit: OwnedSemaphorePermit,
}

impl Spare {
    /// Whether it is ready at once.
    pub(crate) fn is_ready(&self) -> bool {
        self.making.is_finished()
    }

    /// The sandbox, when it is made; `None` if that failed.
    pub(crate) async fn into_sandbox(self) -> Option<Box<dyn Prepared>> {
        self.making.await.ok()?.ok()
    }

    /// Destroys it in the background.
    fn discard(self, receipts: Arc<Receipts>) {
        task::background("discard spare", async move {
            // The permit is held until nothing is left, so that the worker can wait for that.
            let Self { making, _permit, .. } = self;
            if let Ok(Ok(sandbox)) = making.await {
                receipts.judge(sandbox.discard().await);
            }
        });
    }

    fn is_old(&self) -> bool {
        self.made_at.elapsed() >= SPARE_AGE
    }
}

#[derive(Debug)]
enum Entry {
    Acquiring,
    Held(Box<Held>),
    Releasing(LeaseEpoch),
}

#[derive(Debug)]
struct Held {
    epoch: LeaseEpoch,
    spec: SessionSpec,
    /// Who its processes are.
    ids: Ids,
    closing: bool,
    used_at: Instant,
    spare: Option<Box<Spare>>,
}

/// All sessions of this worker.
#[derive(Debug)]
pub(crate) struct Sessions {
    table: Mutex<HashMap<SessionId, Entry>>,
    spares: Arc<Semaphore>,
    max_spares: u32,
    /// Memory is short: nobody keeps a spare.
    pressed: AtomicBool,
    receipts: Arc<Receipts>,
}

impl Sessions {
    pub(crate) fn new(max_spares: usize, receipts: Arc<Receipts>) -> Self {
        let max_spares = u32::try_from(max_spares).unwrap_or(u32::MAX);
        let spares = Arc::new(Semaphore::new(max_spares as usize));
        Self { table: Mutex::default(), spares, max_spares, pressed: AtomicBool::new(false), receipts }
    }

    /// How many are held.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn holding(&self, id: SessionId) -> Holding {
        match self.lock().get(&id) {
            None => Holding::Not,
            Some(Entry::Acquiring | Entry::Releasing(_)) => Holding::Changing,
            Some(Entry::Held(held)) => Holding::Held { epoch: held.epoch, closing: held.closing },
        }
    }

    /// Marks a session as being taken; `false` if it is held or changing already.
    pub(crate) fn begin_acquire(&self, id: SessionId) -> bool {
        let mut table = self.lock();
        if table.contains_key(&id) {
            return false;
        }
        table.insert(id, Entry::Acquiring);
        true
    }

    /// Who the processes of a held session are.
    pub(crate) fn ids(&self, id: SessionId) -> Option<Ids> {
        match self.lock().get(&id)? {
            Entry::Held(held) => Some(held.ids),
            Entry::Acquiring | Entry::Releasing(_) => None,
        }
    }

    /// What file calls of a session must know, if it is held under this epoch and has not ended.
    pub(crate) fn for_files(&self, id: SessionId, epoch: LeaseEpoch) -> Option<(SessionSpec, Ids)> {
        match self.lock().get(&id)? {
            Entry::Held(held) if held.epoch == epoch && !held.closing => Some((held.spec.clone(), held.ids)),
            Entry::Held(_) | Entry::Acquiring | Entry::Releasing(_) => None,
        }
    }

    /// The lease is ours.
    pub(crate) fn acquired(&self, lease: Lease, ids: Ids) {
        let held = Held {
            epoch: lease.token.epoch,
            spec: lease.spec,
            ids,
            closing: false,
            used_at: Instant::now(),
            spare: None,
        };
        self.lock().insert(lease.session, Entry::Held(Box::new(held)));
    }

    /// The session has ended; its runs are to be canceled.
    pub(crate) fn close(&self, id: SessionId) {
        let spare = match self.lock().get_mut(&id) {
            Some(Entry::Held(held)) => {
                held.closing = true;
                held.spare.take()
            }
            _ => None,
        };
        self.discard(spare);
    }

    /// The session is not ours any more, or never was.
    pub(crate) fn forget(&self, id: SessionId) {
        let entry = self.lock().remove(&id);
        self.discard(entry.and_then(Entry::into_spare));
    }

    /// Marks a held session as being given back and returns its epoch.
    pub(crate) fn begin_release(&self, id: SessionId) -> Option<LeaseEpoch> {
        let (epoch, spare) = {
            let mut table = self.lock();
            let entry = table.get_mut(&id)?;
            let epoch = match entry {
                Entry::Acquiring => return None,
                Entry::Held(held) => held.epoch,
                Entry::Releasing(epoch) => *epoch,
            };
            (epoch, std::mem::replace(entry, Entry::Releasing(epoch)).into_spare())
        };
        self.discard(spare);
        Some(epoch)
    }

    /// All sessions in the table.
    pub(crate) fn all(&self) -> Vec<SessionId> {
        self.lock().keys().copied().collect()
    }

    /// Forgets all: their leases are lost or released.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        all.into_values().for_each(|entry| self.discard(entry.into_spare()));
    }

    /// Waits until no spare sandbox is left.
    pub(crate) async fn no_spares(&self) {
        // The semaphore is never closed.
        let _ = self.spares.acquire_many(self.max_spares).await;
    }

    /// Notes that a session is in use and takes its spare sandbox if that serves the plan.
    pub(crate) fn take_spare(&self, id: SessionId, wanted: &Plan) -> Option<Spare> {
        let mut table = self.lock();
        let Some(Entry::Held(held)) = table.get_mut(&id) else { return None };
        held.used_at = Instant::now();
        held.spare.take_if(|spare| !spare.is_old() && serves(&spare.plan, wanted)).map(|spare| *spare)
    }

    /// What a run of this session is like that asks for nothing of its own; `None` if the session is
    /// not held or cannot be served.
    pub(crate) fn usual_run(&self, id: SessionId) -> Option<RunSpec> {
        match self.lock().get(&id)? {
            Entry::Held(held) if !held.closing => Some(usual_run(&held.spec)),
            _ => None,
        }
    }

    /// Gives a session its spare sandbox, unless it has one that serves, or there are too many.
    pub(crate) fn keep_spare<F>(&self, id: SessionId, plan: Plan, make: impl FnOnce(Plan) -> F)
    where
        F: Future<Output = Result<Box<dyn Prepared>, Refusal>> + Send + 'static,
    {
        if self.pressed.load(Ordering::Relaxed) {
            return;
        }
        let Ok(permit) = self.spares.clone().try_acquire_owned() else { return };
        let old = {
            let mut table = self.lock();
            let Some(Entry::Held(held)) = table.get_mut(&id) else { return };
            let is_good = |spare: &Spare| !spare.is_old() && serves(&spare.plan, &plan);
            if held.closing || held.spare.as_deref().is_some_and(is_good) {
                return;
            }
            let making = task::background("prepare spare", make(plan.clone()));
            held.spare.replace(Box::new(Spare { plan, made_at: Instant::now(), making, _permit: permit }))
        };
        self.discard(old);
    }

    /// Discards the spare sandboxes that are old, and those of sessions that are not in use; all of them if
    /// memory is short.
    pub(crate) fn tidy_spares(&self, pressed: bool) {
        if self.pressed.swap(pressed, Ordering::Relaxed) != pressed {
            tracing::info!(pressed, "memory for spare sandboxes");
        }
        let old: Vec<_> = self
            .lock()
            .values_mut()
            .filter_map(|entry| match entry {
                Entry::Held(held) if pressed || held.used_at.elapsed() >= SPARE_IDLE => held.spare.take(),
                Entry::Held(held) => held.spare.take_if(|spare| spare.is_old()),
                _ => None,
            })
            .collect();
        old.into_iter().for_each(|spare| self.discard(Some(spare)));
    }

    fn discard(&self, spare: Option<Box<Spare>>) {
        if let Some(spare) = spare {
            spare.discard(self.receipts.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
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

fn usual_run(spec: &SessionSpec) -> RunSpec {
    RunSpec {
        command: codelia_types::CommandSpec {
            argv: Vec::new(),
            env: std::collections::BTreeMap::new(),
            working_directory: String::new(),
            terminal: None,
            stdin: false,
        },
        mode: spec.mode,
        network: spec.network,
        limits: spec.limits.clone(),
        requested_limits: spec.requested_limits.clone(),
        policy: spec.policy.clone(),
        ends_with_caller: false,
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{Enforceable, Limits, LimitsRequest, PlanTarget, Policy};
    use codelia_types::{Incarnation, LeaseToken, Mode, Receipt, RunId};

    use super::*;

    const IDS: Ids = Ids { uid: 7, gid: 7 };

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
            },
            has_files: false,
        }
    }

    fn held(sessions: &Sessions) -> SessionId {
        let lease = lease(3);
        let id = lease.session;
        assert!(sessions.begin_acquire(id));
        sessions.acquired(lease, IDS);
        id
    }

    fn plan(sessions: &Sessions, id: SessionId) -> Plan {
        let spec = sessions.usual_run(id).unwrap();
        Plan::logical(
            PlanTarget { sandbox: RunId::generate(), session: id, root: "/root".into() },
            &spec,
            Enforceable::default(),
        )
        .unwrap()
    }

    #[derive(Debug)]
    struct Nothing;

    #[async_trait::async_trait]
    impl Prepared for Nothing {
        async fn launch(
            self: Box<Self>,
            _: &codelia_types::CommandSpec,
            _: codelia_backends::Stdio,
        ) -> Result<codelia_backends::Launched, codelia_backends::Error> {
            Err(codelia_backends::Error::Unenforceable { field: "nothing" })
        }

        async fn discard(self: Box<Self>) -> Receipt {
            Receipt::default()
        }
    }

    async fn make(_: Plan) -> Result<Box<dyn Prepared>, Refusal> {
        Ok(Box::new(Nothing))
    }

    #[test]
    fn a_session_is_changing_until_its_lease_is_known() {
        let sessions = Sessions::new(1, Arc::default());
        let lease = lease(7);
        let id = lease.session;
        assert!(sessions.begin_acquire(id));
        assert!(!sessions.begin_acquire(id), "once at a time");
        assert_eq!(sessions.holding(id), Holding::Changing);
        sessions.acquired(lease, IDS);
        assert_eq!(sessions.holding(id), Holding::Held { epoch: LeaseEpoch(7), closing: false });
        assert_eq!(sessions.begin_release(id), Some(LeaseEpoch(7)));
        assert_eq!(sessions.holding(id), Holding::Changing);
        sessions.forget(id);
        assert_eq!(sessions.holding(id), Holding::Not);
    }

    #[tokio::test]
    async fn a_spare_serves_one_run_and_only_one_that_it_fits() {
        let sessions = Sessions::new(1, Arc::default());
        let id = held(&sessions);
        let usual = plan(&sessions, id);
        sessions.keep_spare(id, usual.clone(), make);
        let other = Plan { limits: Limits { pids: 1, ..Limits::default() }, ..usual.clone() };
        assert!(sessions.take_spare(id, &other).is_none());
        let spare = sessions.take_spare(id, &usual).unwrap();
        assert!(spare.into_sandbox().await.is_some());
        assert!(sessions.take_spare(id, &usual).is_none());
    }

    #[tokio::test]
    async fn spares_are_bounded_over_all_sessions() {
        let sessions = Sessions::new(1, Arc::default());
        let (first, second) = (held(&sessions), held(&sessions));
        sessions.keep_spare(first, plan(&sessions, first), make);
        sessions.keep_spare(second, plan(&sessions, second), make);
        assert!(sessions.take_spare(second, &plan(&sessions, second)).is_none());
        assert!(sessions.take_spare(first, &plan(&sessions, first)).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_session_loses_its_spare() {
        let sessions = Sessions::new(1, Arc::default());
        let id = held(&sessions);
        sessions.keep_spare(id, plan(&sessions, id), make);
        sessions.tidy_spares(false);
        tokio::time::advance(SPARE_IDLE).await;
        sessions.tidy_spares(false);
        assert!(sessions.take_spare(id, &plan(&sessions, id)).is_none());
    }

    #[tokio::test]
    async fn nobody_has_a_spare_while_memory_is_short() {
        let sessions = Sessions::new(1, Arc::default());
        let id = held(&sessions);
        let usual = plan(&sessions, id);
        sessions.keep_spare(id, usual.clone(), make);
        sessions.tidy_spares(true);
        assert!(sessions.take_spare(id, &usual).is_none());
        sessions.no_spares().await;
        sessions.keep_spare(id, usual.clone(), make);
        assert!(sessions.take_spare(id, &usual).is_none());
        sessions.tidy_spares(false);
        sessions.keep_spare(id, usual.clone(), make);
        assert!(sessions.take_spare(id, &usual).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_spare_is_not_used_and_goes() {
        let sessions = Sessions::new(1, Arc::default());
        let id = held(&sessions);
        let usual = plan(&sessions, id);
        sessions.keep_spare(id, usual.clone(), make);
        tokio::time::advance(SPARE_AGE).await;
        assert!(sessions.take_spare(id, &usual).is_none());
        sessions.tidy_spares(false);
        assert!(matches!(sessions.lock().get(&id), Some(Entry::Held(held)) if held.spare.is_none()));
    }

    #[tokio::test]
    async fn a_closing_session_gets_no_spare() {
        let sessions = Sessions::new(1, Arc::default());
        let id = held(&sessions);
        let usual = plan(&sessions, id);
        sessions.close(id);
        sessions.keep_spare(id, usual.clone(), make);
        assert!(sessions.take_spare(id, &usual).is_none());
        assert!(sessions.usual_run(id).is_none());
    }
}
