//! The model that is checked: the protocol or a broken variant, its bounds and its properties.

use stateright::{Model, Property};

use crate::{
    action::{Action, Step},
    state::{FaultBudget, LocalRun, RunState, State},
};

/// The protocol, or the protocol without one of its safeguards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// The protocol as implemented.
    Correct,
    /// A commit checks only that the run is running.
    NoCommitGuard,
    /// A worker that cannot renew keeps its sandboxes.
    NoSelfFencing,
    /// A worker accepts a push for a run that it already handled.
    NoPushMemory,
    /// A late answer to a renewal revives a lease that the worker considered expired.
    RevivedLease,
    /// An expired worker is replaced without marking its row, so a renewal in flight can revive it.
    NoExpiryMark,
    /// A hand-back does not check the turn.
    NoTurnGuard,
    /// A started run is queued again although its caller allowed no retries.
    UnrequestedRetry,
    /// An insert assigns a run without locking the session.
    NoInsertLock,
}

/// Bounds of the state space.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// Allowed retries of each run.
    pub retries: Vec<u8>,
    /// Faults on one path.
    pub faults: FaultBudget,
    /// Maximum time on the database's clock.
    pub ticks: u8,
    /// How often a push may arrive.
    pub pushes: u8,
    /// Whether to check in each state that all runs end after the faults stop.
    pub check_recovery: bool,
}

/// The model.
#[derive(Debug, Clone)]
pub struct Protocol {
    /// The safeguard that is missing, if any.
    pub variant: Variant,
    /// Bounds of the state space.
    pub bounds: Bounds,
}

impl Protocol {
    pub(crate) fn is(&self, variant: Variant) -> bool {
        self.variant == variant
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State::first(self.bounds.retries.len(), self.bounds.faults)]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let mut actions = Vec::new();
        if state.now < self.bounds.ticks {
            self.time_actions(state, &mut actions);
        }
        self.fault_actions(state, &mut actions);
        self.work_actions(state, &mut actions);
        let may_be_slow = |action: &&Action| state.budget.slow_calls > 0 && action.sends();
        steps
            .extend(actions.iter().filter(may_be_slow).map(|action| Step { action: *action, is_slow: true }));
        steps.extend(actions.into_iter().map(Step::from));
    }

    fn next_state(&self, state: &State, action: Step) -> Option<State> {
        let mut next = state.clone();
        self.apply(&mut next, action);
        // The order of the calls does not matter. Sorting them merges equal states.
        next.calls.sort_by_key(|call| (call.statement, call.by.worker, call.by.number));
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always("only the lease holder has a running sandbox", |_, state: &State| {
                only_holder_runs(state)
            }),
            Property::always("no worker commits without holding the lease", |_, state: &State| {
                !state.history.stale_commit
            }),
            Property::always("a run gets one outcome", |_, state: &State| {
                state.history.outcomes.iter().all(|times| *times <= 1)
            }),
            Property::always("a run starts again only if retries are allowed", |model: &Self, state| {
                state
                    .history
                    .starts
                    .iter()
                    .zip(&model.bounds.retries)
                    .all(|(starts, retries)| *starts <= 1 + retries)
            }),
            Property::always("no run is lost without a fault", |_, state: &State| {
                state.history.had_fault || state.runs.iter().all(|run| run.state != RunState::Lost)
            }),
            // These show that the interesting states are reached.
            Property::sometimes("a run is lost", |_, state: &State| {
                state.runs.iter().any(|run| run.state == RunState::Lost)
            }),
            Property::sometimes("another worker takes over the session", |_, state: &State| {
                state.session.epoch > 1
            }),
            Property::sometimes("all runs exit", |_, state: &State| {
                state.runs.iter().all(|run| matches!(run.state, RunState::Exited(_)))
            }),
        ];
        if self.bounds.check_recovery {
            all.push(Property::always("every run ends after the faults stop", |model: &Self, state| {
                model.recovers(state)
            }));
        }
        all
    }
}

/// Whether only the lease holder has a running command in the session. Exempts a worker that is
/// paused, or was and has not checked its lease since: a command that it just started is not paused.
fn only_holder_runs(state: &State) -> bool {
    state.workers.iter().enumerate().all(|(number, worker)| {
        let is_live = worker.runs.iter().any(|run| matches!(run, LocalRun::Running { .. }));
        let other = state.session.holder.is_some_and(|holder| usize::from(holder.worker) != number);
        !is_live || worker.has_unchecked_pause || !other
    })
}
