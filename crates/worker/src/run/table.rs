//! The runs this worker has or had: what makes a run start at most once, and the handles of live ones.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use codelia_store::AssignedRun;
use codelia_types::{EndedRun, Incarnation, LeaseToken, RunId, SessionId, TerminalSize};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{run::output::OutputLog, run::violations::ViolationLog};

/// How long a run is remembered after its end. Longer than any push may be late.
const REMEMBERED: Duration = Duration::from_secs(120);
/// How long a run that ends with its caller waits for it.
const OWNER_WAIT: Duration = Duration::from_secs(10);

/// Where a run is, for its watchers.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// The worker has it.
    Assigned,
    /// Its command was started.
    Started(Started),
    /// Its result is in the store.
    Committed(Arc<EndedRun>),
    /// Its lease was lost; what became of it is for the store to say.
    Dropped,
}

/// How a command was started.
#[derive(Debug, Clone)]
pub(crate) struct Started {
    pub(crate) setup_time: Duration,
    pub(crate) prepared: bool,
    pub(crate) unenforced: Vec<String>,
}

/// What a caller may do to a command beside writing to it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    Signal(i32),
    Resize(TerminalSize),
}

/// The receiving ends of a run's input.
#[derive(Debug)]
pub(crate) struct Inlets {
    pub(crate) stdin: mpsc::Receiver<Bytes>,
    pub(crate) control: mpsc::Receiver<Control>,
}

/// A run that is being executed.
#[derive(Debug)]
pub(crate) struct ActiveRun {
    pub(crate) assigned: AssignedRun,
    /// The lease that the run is recorded for.
    pub(crate) lease: LeaseToken,
    /// Cancelled when the lease is lost.
    pub(crate) fence: CancellationToken,
    /// Cancelled when somebody asked for its end.
    pub(crate) cancel: CancellationToken,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) output: Arc<OutputLog>,
    pub(crate) violations: ViolationLog,
    pub(crate) control: mpsc::Sender<Control>,
    stdin: Mutex<Option<mpsc::Sender<Bytes>>>,
    owner: Mutex<Owner>,
    pub(crate) owner_deadline: Instant,
}

/// Who a run ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Nobody.
    None,
    /// Its caller, who has not come yet.
    Awaited,
    /// This many callers' streams.
    Attached(usize),
}

impl ActiveRun {
    pub(crate) fn new(
        assigned: AssignedRun,
        lease: LeaseToken,
        fence: &CancellationToken,
    ) -> (Arc<Self>, Inlets) {
        let (stdin, stdin_end) = mpsc::channel(16);
        let (control, control_end) = mpsc::channel(16);
        let spec = &assigned.spec;
        let run = Self {
            lease,
            fence: fence.child_token(),
            cancel: CancellationToken::new(),
            phase: watch::Sender::new(Phase::Assigned),
            output: Arc::new(OutputLog::new(spec.limits.output_bytes)),
            violations: ViolationLog::new(),
            control,
            stdin: Mutex::new(spec.command.stdin.then_some(stdin)),
            owner: Mutex::new(if spec.ends_with_caller { Owner::Awaited } else { Owner::None }),
            owner_deadline: Instant::now() + OWNER_WAIT,
            assigned,
        };
        if run.assigned.cancel_requested {
            run.cancel.cancel();
        }
        (Arc::new(run), Inlets { stdin: stdin_end, control: control_end })
    }

    pub(crate) fn id(&self) -> RunId {
        self.assigned.id
    }

    /// Where to write for its standard input, while that is open.
    pub(crate) fn stdin(&self) -> Option<mpsc::Sender<Bytes>> {
        self.stdin.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn close_stdin(&self) {
        drop(self.stdin.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// A caller that the run ends with is here.
    pub(crate) fn owner_attached(&self) {
        let mut owner = self.owner();
        *owner = match *owner {
            Owner::None => Owner::None,
            Owner::Awaited => Owner::Attached(1),
            Owner::Attached(n) => Owner::Attached(n + 1),
        };
    }

    /// A caller that the run ends with went away; with the last one the run ends.
    pub(crate) fn owner_left(&self) {
        let mut owner = self.owner();
        if let Owner::Attached(n) = *owner {
            *owner = Owner::Attached(n.saturating_sub(1));
            if n <= 1 {
                self.cancel.cancel();
            }
        }
    }

    /// The run ends with nobody any more.
    pub(crate) fn detach(&self) {
        *self.owner() = Owner::None;
    }

    /// Whether its caller has not come.
    pub(crate) fn awaits_owner(&self) -> bool {
        *self.owner() == Owner::Awaited
    }

    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum Entry {
    /// It waits for a slot, or is just being handed back or begun.
    Waiting,
    Active(Arc<ActiveRun>),
    /// What became of it here does not matter any more.
    Past {
        past: Past,
        by: Incarnation,
        since: Instant,
    },
}

/// What a life of the worker did with a run. The store may give it again; a push that is late or
/// comes twice never may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Past {
    /// It was to begin it; whether the store knows is unknown.
    Left,
    /// It gave it back.
    HandedBack,
    /// It began it.
    Ended,
}

/// How a worker hears of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// An api pushed it, some time ago.
    Push,
    /// The store has it as running for this life of the worker.
    Assigned,
    /// The store has it as queued.
    Queued,
}

impl Source {
    /// Whether a run may be taken once more.
    fn allows(self, past: Past) -> bool {
        match past {
            Past::Left => self != Self::Push,
            // What the store had it as before it was given back must not count.
            Past::HandedBack => self == Self::Queued,
            Past::Ended => false,
        }
    }
}

/// What the worker knows of a run.
#[derive(Debug)]
pub(crate) enum Known {
    /// Nothing.
    No,
    Waiting,
    Active(Arc<ActiveRun>),
    Past(Past),
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<RunId, Entry>,
    /// Past runs in the order they are forgotten.
    fading: VecDeque<(Instant, RunId)>,
}

/// All runs the worker knows of.
#[derive(Debug)]
pub(crate) struct Runs {
    table: Mutex<Table>,
    active: watch::Sender<usize>,
}

impl Runs {
    pub(crate) fn new() -> Self {
        Self { table: Mutex::default(), active: watch::Sender::new(0) }
    }

    /// What is known of a run in this life of the worker.
    pub(crate) fn known(&self, id: RunId, now: Incarnation) -> Known {
        self.lock().known(id, now)
    }

    /// Claims a run, unless what is known of it forbids that.
    pub(crate) fn claim(&self, id: RunId, now: Incarnation, source: Source) -> Result<(), Known> {
        let mut table = self.lock();
        match table.known(id, now) {
            Known::Past(past) if !source.allows(past) => Err(Known::Past(past)),
            Known::No | Known::Past(_) => {
                table.entries.insert(id, Entry::Waiting);
                Ok(())
            }
            known => Err(known),
        }
    }

    /// A claimed run is executed from here on.
    pub(crate) fn activate(&self, run: Arc<ActiveRun>) {
        let old = self.lock().entries.insert(run.id(), Entry::Active(run));
        if !matches!(old, Some(Entry::Active(_))) {
            self.active.send_modify(|count| *count += 1);
        }
    }

    /// A run is over.
    pub(crate) fn end(&self, run: &ActiveRun) {
        let old = self.lock().fade(run.id(), Past::Ended, run.lease.incarnation);
        if matches!(old, Some(Entry::Active(_))) {
            self.active.send_modify(|count| *count = count.saturating_sub(1));
        }
    }

    /// A run that is not executed was given back.
    pub(crate) fn handed_back(&self, id: RunId, by: Incarnation) {
        self.lock().fade(id, Past::HandedBack, by);
    }

    /// A claimed run is none of ours, or nobody knows: the poll will tell.
    pub(crate) fn leave(&self, id: RunId, by: Incarnation) {
        let mut table = self.lock();
        if matches!(table.entries.get(&id), Some(Entry::Waiting)) {
            table.fade(id, Past::Left, by);
        }
    }

    /// The store still has a run that ended here as running: it must be remembered longer.
    pub(crate) fn remember(&self, id: RunId, by: Incarnation) {
        self.lock().fade(id, Past::Ended, by);
    }

    /// The run, if it is being executed.
    pub(crate) fn active(&self, id: RunId) -> Option<Arc<ActiveRun>> {
        match self.lock().entries.get(&id) {
            Some(Entry::Active(run)) => Some(run.clone()),
            _ => None,
        }
    }

    /// All runs that are being executed.
    pub(crate) fn all_active(&self) -> Vec<Arc<ActiveRun>> {
        let table = self.lock();
        let active = table.entries.values().filter_map(|entry| match entry {
            Entry::Active(run) => Some(run.clone()),
            _ => None,
        });
        active.collect()
    }

    /// The runs of a session that are being executed.
    pub(crate) fn of_session(&self, session: SessionId) -> Vec<Arc<ActiveRun>> {
        let mut runs = self.all_active();
        runs.retain(|run| run.assigned.session == session);
        runs
    }

    /// Waits until none is being executed.
    pub(crate) async fn none_active(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.active.subscribe().wait_for(|count| *count == 0).await;
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn known(&self, id: RunId, now: Incarnation) -> Known {
        match self.entries.get(&id) {
            Some(Entry::Waiting) => Known::Waiting,
            Some(Entry::Active(run)) => Known::Active(run.clone()),
            Some(Entry::Past { past, by, .. }) if *by == now => Known::Past(*past),
            // What an earlier life did was fenced: the store may have queued the run again.
            Some(Entry::Past { .. }) | None => Known::No,
        }
    }

    /// Remembers a run for a while, and forgets those whose time is over.
    fn fade(&mut self, id: RunId, past: Past, by: Incarnation) -> Option<Entry> {
        let now = Instant::now();
        while let Some((then, id)) = self.fading.front().copied()
            && now.duration_since(then) >= REMEMBERED
        {
            self.fading.pop_front();
            // Unless something else became of it since.
            if matches!(self.entries.get(&id), Some(Entry::Past { since, .. }) if *since == then) {
                self.entries.remove(&id);
            }
        }
        self.fading.push_back((now, id));
        self.entries.insert(id, Entry::Past { past, by, since: now })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use codelia_policy::{Limits, LimitsRequest, RunSpec};
    use codelia_types::{CommandSpec, LeaseEpoch, Mode};

    use super::*;

    pub(crate) fn assigned(ends_with_caller: bool) -> AssignedRun {
        let command = CommandSpec {
            argv: vec!["true".into()],
            env: BTreeMap::new(),
            working_directory: String::new(),
            terminal: None,
            stdin: true,
        };
        let spec = RunSpec {
            command,
            mode: Mode::Logical,
            network: None,
            limits: Limits::default(),
            requested_limits: LimitsRequest::default(),
            policy: codelia_policy::Policy::default(),
            ends_with_caller,
        };
        AssignedRun {
            id: RunId::generate(),
            session: SessionId::generate(),
            tenant: "team".parse().unwrap(),
            spec,
            epoch: LeaseEpoch(1),
            attempt: 1,
            turn: 0,
            cancel_requested: false,
        }
    }

    pub(crate) fn active(ends_with_caller: bool, life: Incarnation) -> Arc<ActiveRun> {
        activate(assigned(ends_with_caller), life)
    }

    pub(crate) fn activate(assigned: AssignedRun, incarnation: Incarnation) -> Arc<ActiveRun> {
        let lease = LeaseToken { worker: "w".parse().unwrap(), incarnation, epoch: assigned.epoch };
        ActiveRun::new(assigned, lease, &CancellationToken::new()).0
    }

    #[tokio::test]
    async fn a_run_is_claimed_once_and_remembered_after_its_end() {
        let (runs, life) = (Runs::new(), Incarnation::generate());
        let run = active(false, life);
        let push = || runs.claim(run.id(), life, Source::Push);
        assert!(push().is_ok());
        assert!(matches!(push(), Err(Known::Waiting)));
        runs.activate(run.clone());
        assert!(matches!(push(), Err(Known::Active(_))));
        runs.end(&run);
        for source in [Source::Push, Source::Assigned, Source::Queued] {
            assert!(matches!(runs.claim(run.id(), life, source), Err(Known::Past(Past::Ended))));
        }
        runs.none_active().await;
    }

    #[tokio::test]
    async fn a_run_that_was_handed_back_comes_again_as_queued_but_never_as_a_push() {
        let (runs, life, id) = (Runs::new(), Incarnation::generate(), RunId::generate());
        assert!(runs.claim(id, life, Source::Push).is_ok());
        runs.handed_back(id, life);
        assert!(runs.claim(id, life, Source::Push).is_err());
        assert!(runs.claim(id, life, Source::Assigned).is_err(), "what the store said before is out of date");
        assert!(runs.claim(id, life, Source::Queued).is_ok());
    }

    #[tokio::test]
    async fn a_run_that_was_left_is_taken_again_from_the_store_alone() {
        let (runs, life, id) = (Runs::new(), Incarnation::generate(), RunId::generate());
        assert!(runs.claim(id, life, Source::Queued).is_ok());
        runs.leave(id, life);
        assert!(runs.claim(id, life, Source::Push).is_err());
        assert!(runs.claim(id, life, Source::Assigned).is_ok());
    }

    #[tokio::test]
    async fn another_life_of_the_worker_may_start_what_an_earlier_one_lost() {
        let (runs, life) = (Runs::new(), Incarnation::generate());
        let run = active(false, life);
        runs.activate(run.clone());
        runs.end(&run);
        assert!(runs.claim(run.id(), Incarnation::generate(), Source::Push).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn ended_runs_are_forgotten_in_time() {
        let (runs, life) = (Runs::new(), Incarnation::generate());
        let run = active(false, life);
        runs.activate(run.clone());
        runs.end(&run);
        tokio::time::advance(REMEMBERED / 2).await;
        runs.remember(run.id(), life);
        tokio::time::advance(REMEMBERED / 2).await;
        runs.handed_back(RunId::generate(), life);
        assert!(matches!(runs.known(run.id(), life), Known::Past(Past::Ended)), "it was needed since");
        tokio::time::advance(REMEMBERED).await;
        runs.handed_back(RunId::generate(), life);
        assert!(matches!(runs.known(run.id(), life), Known::No));
        assert_eq!(runs.lock().entries.len(), 1);
    }

    #[tokio::test]
    async fn a_run_ends_with_its_last_owner_unless_it_was_detached() {
        let life = Incarnation::generate();
        let run = active(true, life);
        assert!(run.awaits_owner());
        run.owner_attached();
        run.owner_attached();
        run.owner_left();
        assert!(!run.cancel.is_cancelled());
        run.owner_left();
        assert!(run.cancel.is_cancelled());

        let run = active(true, life);
        run.owner_attached();
        run.detach();
        run.owner_left();
        assert!(!run.cancel.is_cancelled() && !run.awaits_owner());
    }

    #[tokio::test]
    async fn an_ordinary_run_ends_with_nobody() {
        let run = active(false, Incarnation::generate());
        run.owner_attached();
        run.owner_left();
        assert!(!run.cancel.is_cancelled());
    }
}
