//! The runs this worker has or had. The registry makes sure that a run starts at most once.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use codelia_types::{Incarnation, RunId, SessionId};
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{lease::worker_lease::WorkerLease, run::active::ActiveRun};

/// How long a run is remembered after its end. Longer than any push can be delayed.
const RETENTION: Duration = Duration::from_secs(120);

#[derive(Debug)]
enum Entry {
    /// The run waits for a slot, or is being started or handed back.
    Waiting,
    Active(Arc<ActiveRun>),
    /// This worker is done with it.
    Retired {
        outcome: PriorOutcome,
        by: Incarnation,
        since: Instant,
    },
}

/// The end of an incarnation's part in a run. The store may assign the run again; a push
/// that is late or repeated must not start it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PriorOutcome {
    /// The worker wanted to begin it; whether the store recorded that is unknown.
    Left,
    HandedBack,
    Ended,
}

/// How the worker learned of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunSource {
    /// An api pushed it, possibly a while ago.
    Push,
    /// The store has it as running in this incarnation of the worker.
    Assigned,
    /// The store has it as queued.
    Queued,
}

impl RunSource {
    /// Whether the worker may take the run again.
    fn allows(self, prior: PriorOutcome) -> bool {
        match prior {
            PriorOutcome::Left => self != Self::Push,
            // An assignment that was read before the hand-back is out of date.
            PriorOutcome::HandedBack => self == Self::Queued,
            PriorOutcome::Ended => false,
        }
    }
}

/// The state of a run, as far as the worker knows.
#[derive(Debug)]
pub(crate) enum RunStatus {
    Unknown,
    Waiting,
    Active(Arc<ActiveRun>),
    Prior(PriorOutcome),
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<RunId, Entry>,
    /// Retired runs, the next one to be forgotten first.
    retired: VecDeque<(Instant, RunId)>,
}

/// All runs the worker knows of.
#[derive(Debug)]
pub(crate) struct RunRegistry {
    table: Mutex<Table>,
    active: watch::Sender<usize>,
}

impl RunRegistry {
    pub(crate) fn new() -> Self {
        Self { table: Mutex::default(), active: watch::Sender::new(0) }
    }

    /// The state of a run, as far as this incarnation knows.
    pub(crate) fn status(&self, id: RunId, incarnation: Incarnation) -> RunStatus {
        self.table.lock().status(id, incarnation)
    }

    /// Claims a run, unless its status forbids that.
    pub(crate) fn claim(
        &self,
        id: RunId,
        incarnation: Incarnation,
        source: RunSource,
    ) -> Result<(), RunStatus> {
        let mut table = self.table.lock();
        match table.status(id, incarnation) {
            RunStatus::Prior(prior) if !source.allows(prior) => Err(RunStatus::Prior(prior)),
            RunStatus::Unknown | RunStatus::Prior(_) => {
                table.entries.insert(id, Entry::Waiting);
                Ok(())
            }
            status => Err(status),
        }
    }

    /// A claimed run begins.
    pub(crate) fn activate(&self, run: Arc<ActiveRun>) {
        let old = self.table.lock().entries.insert(run.id(), Entry::Active(run));
        if !matches!(old, Some(Entry::Active(_))) {
            self.active.send_modify(|count| *count += 1);
        }
    }

    /// A run is over.
    pub(crate) fn end(&self, run: &ActiveRun) {
        let old = self.table.lock().retire(run.id(), PriorOutcome::Ended, run.lease.incarnation);
        if matches!(old, Some(Entry::Active(_))) {
            self.active.send_modify(|count| *count = count.saturating_sub(1));
        }
    }

    /// A run that did not begin was handed back.
    pub(crate) fn handed_back(&self, id: RunId, by: Incarnation) {
        self.table.lock().retire(id, PriorOutcome::HandedBack, by);
    }

    /// A claimed run is not ours, or that is unknown: the poll finds out.
    pub(crate) fn leave(&self, id: RunId, by: Incarnation) {
        let mut table = self.table.lock();
        if matches!(table.entries.get(&id), Some(Entry::Waiting)) {
            table.retire(id, PriorOutcome::Left, by);
        }
    }

    /// Remembers an ended run longer: the store still has it as running.
    pub(crate) fn remember(&self, id: RunId, by: Incarnation) {
        self.table.lock().retire(id, PriorOutcome::Ended, by);
    }

    /// The run, if it is being executed.
    pub(crate) fn active(&self, id: RunId) -> Option<Arc<ActiveRun>> {
        match self.table.lock().entries.get(&id) {
            Some(Entry::Active(run)) => Some(run.clone()),
            _ => None,
        }
    }

    pub(crate) fn all_active(&self) -> Vec<Arc<ActiveRun>> {
        let table = self.table.lock();
        let active = table.entries.values().filter_map(|entry| match entry {
            Entry::Active(run) => Some(run.clone()),
            _ => None,
        });
        active.collect()
    }

    /// Whether a run of this session is being executed.
    pub(crate) fn has_active(&self, session: SessionId) -> bool {
        self.all_active().iter().any(|run| run.assigned.session == session)
    }

    /// Cancels the runs of a session.
    pub(crate) fn cancel_session(&self, session: SessionId) {
        for run in self.all_active().iter().filter(|run| run.assigned.session == session) {
            run.cancel.cancel();
        }
    }

    /// Lets the sandboxes under a lease run until its end.
    pub(crate) fn extend_sandboxes(&self, lease: &WorkerLease) {
        for run in self.all_active().iter().filter(|run| run.lease.incarnation == lease.incarnation)
        {
            if let Some(sandbox) = run.sandbox.get() {
                sandbox.keep_alive(lease.left());
            }
        }
    }

    /// Has every sandbox kill its processes.
    pub(crate) fn kill_sandboxes(&self) {
        self.all_active()
            .iter()
            .filter_map(|run| run.sandbox.get())
            .for_each(|sandbox| sandbox.kill());
    }

    /// Waits until no run is being executed.
    pub(crate) async fn none_active(&self) {
        // Fails only if the sender is dropped, which lives as long as `self`.
        let _ = self.active.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Table {
    fn status(&self, id: RunId, incarnation: Incarnation) -> RunStatus {
        match self.entries.get(&id) {
            Some(Entry::Waiting) => RunStatus::Waiting,
            Some(Entry::Active(run)) => RunStatus::Active(run.clone()),
            Some(Entry::Retired { outcome, by, .. }) if *by == incarnation => {
                RunStatus::Prior(*outcome)
            }
            // An earlier incarnation was fenced: the store may have queued the run again.
            Some(Entry::Retired { .. }) | None => RunStatus::Unknown,
        }
    }

    /// Remembers a run for [`RETENTION`] and forgets those that are older.
    fn retire(&mut self, id: RunId, outcome: PriorOutcome, by: Incarnation) -> Option<Entry> {
        let now = Instant::now();
        while let Some((then, id)) = self.retired.front().copied()
            && now.duration_since(then) >= RETENTION
        {
            self.retired.pop_front();
            // Keeps a run that was claimed or retired again since.
            if matches!(self.entries.get(&id), Some(Entry::Retired { since, .. }) if *since == then)
            {
                self.entries.remove(&id);
            }
        }
        self.retired.push_back((now, id));
        self.entries.insert(id, Entry::Retired { outcome, by, since: now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::active::tests::active;

    fn new() -> (RunRegistry, Incarnation, RunId) {
        (RunRegistry::new(), Incarnation::generate(), RunId::generate())
    }

    #[tokio::test]
    async fn run_is_claimed_once_and_remembered() {
        let (runs, incarnation, _) = new();
        let run = active(false, incarnation);
        let push = || runs.claim(run.id(), incarnation, RunSource::Push);
        assert!(push().is_ok());
        assert!(matches!(push(), Err(RunStatus::Waiting)));
        runs.activate(run.clone());
        assert!(matches!(push(), Err(RunStatus::Active(_))));
        runs.end(&run);
        for source in [RunSource::Push, RunSource::Assigned, RunSource::Queued] {
            let claimed = runs.claim(run.id(), incarnation, source);
            assert!(matches!(claimed, Err(RunStatus::Prior(PriorOutcome::Ended))));
        }
        runs.none_active().await;
    }

    #[tokio::test]
    async fn handed_back_run_returns_only_as_queued() {
        let (runs, incarnation, id) = new();
        assert!(runs.claim(id, incarnation, RunSource::Push).is_ok());
        runs.handed_back(id, incarnation);
        assert!(runs.claim(id, incarnation, RunSource::Push).is_err());
        let assigned = runs.claim(id, incarnation, RunSource::Assigned);
        assert!(assigned.is_err(), "the assignment was read before the hand-back");
        assert!(runs.claim(id, incarnation, RunSource::Queued).is_ok());
    }

    #[tokio::test]
    async fn left_run_returns_only_from_store() {
        let (runs, incarnation, id) = new();
        assert!(runs.claim(id, incarnation, RunSource::Queued).is_ok());
        runs.leave(id, incarnation);
        assert!(runs.claim(id, incarnation, RunSource::Push).is_err());
        assert!(runs.claim(id, incarnation, RunSource::Assigned).is_ok());
    }

    #[tokio::test]
    async fn new_incarnation_may_start_lost_run() {
        let (runs, incarnation, _) = new();
        let run = active(false, incarnation);
        runs.activate(run.clone());
        runs.end(&run);
        assert!(runs.claim(run.id(), Incarnation::generate(), RunSource::Push).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn ended_run_is_forgotten_after_retention() {
        let (runs, incarnation, _) = new();
        let run = active(false, incarnation);
        let status = || runs.status(run.id(), incarnation);
        runs.activate(run.clone());
        runs.end(&run);
        tokio::time::advance(RETENTION / 2).await;
        runs.remember(run.id(), incarnation);
        tokio::time::advance(RETENTION / 2).await;
        runs.handed_back(RunId::generate(), incarnation);
        assert!(matches!(status(), RunStatus::Prior(PriorOutcome::Ended)), "it was needed since");
        tokio::time::advance(RETENTION).await;
        runs.handed_back(RunId::generate(), incarnation);
        assert!(matches!(status(), RunStatus::Unknown));
        assert_eq!(runs.table.lock().entries.len(), 1);
    }
}
