//! What is checked: the protocol with its bounds, or a broken variant of it, and its properties.

use stateright::{Model, Property};

use crate::{
    action::{Action, Event},
    state::{Budget, Local, RunState, State},
};

/// The protocol as it is, or with one thing left out. All else is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// As it is.
    Right,
    /// A commit asks only whether the run is running.
    NoEpochGuard,
    /// A worker that cannot renew goes on.
    NoSelfFencing,
    /// A push is taken whatever became of the run.
    NoPushMemory,
    /// A lease that was seen to be over is renewed by an answer that comes late.
    SecondThoughts,
    /// A worker is taken for dead without a look at what is on its way.
    UnmarkedDeath,
    /// A run is handed back whichever turn it is in.
    AnyTurn,
    /// A run that may have been started is queued again though nobody asked for that.
    UnaskedRetry,
    /// A run is recorded for a holder without a lock on the session.
    UnlockedInsert,
}

/// How far the checker looks.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// Runs, and how often each may be started again.
    pub retries: Vec<u8>,
    /// Faults that may happen on any path.
    pub faults: Budget,
    /// Ticks of the database's clock.
    pub ticks: u8,
    /// How often a push may arrive.
    pub pushes: u8,
    /// Whether each state is also asked if all runs end once the faults stop.
    pub heals: bool,
}

/// The model.
#[derive(Debug, Clone)]
pub struct Protocol {
    /// What is left out.
    pub variant: Variant,
    /// How far to look.
    pub bounds: Bounds,
}

impl Protocol {
    pub(crate) fn is(&self, variant: Variant) -> bool {
        self.variant == variant
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Event;

    fn init_states(&self) -> Vec<State> {
        vec![State::first(self.bounds.retries.len(), self.bounds.faults)]
    }

    fn actions(&self, state: &State, events: &mut Vec<Event>) {
        let mut actions = Vec::new();
        if state.now < self.bounds.ticks {
            self.time(state, &mut actions);
        }
        self.faults(state, &mut actions);
        self.steps(state, &mut actions);
        let may_be_slow = |action: &&Action| state.left.slow > 0 && action.sends();
        events.extend(
            actions.iter().filter(may_be_slow).map(|action| Event { action: *action, is_slow: true }),
        );
        events.extend(actions.into_iter().map(Event::from));
    }

    fn next_state(&self, state: &State, action: Event) -> Option<State> {
        let mut next = state.clone();
        self.apply(&mut next, action);
        // The same statements in another order are the same state.
        next.flights.sort_by_key(|flight| (flight.statement, flight.by.worker, flight.by.number));
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always("a living sandbox is its holder's alone", |_, state: &State| {
                lives_under_its_lease(state)
            }),
            Property::always("nobody commits under a lease that is not theirs", |_, state: &State| {
                !state.seen.stale_commit
            }),
            Property::always("a run is given one outcome", |_, state: &State| {
                state.seen.endings.iter().all(|times| *times <= 1)
            }),
            Property::always(
                "a started run is started again only if that was asked for",
                |model: &Self, state| {
                    state
                        .seen
                        .starts
                        .iter()
                        .zip(&model.bounds.retries)
                        .all(|(starts, retries)| *starts <= 1 + retries)
                },
            ),
            Property::always("without a fault nothing is lost", |_, state: &State| {
                state.seen.faulty || state.runs.iter().all(|run| run.state != RunState::Lost)
            }),
            // Without these the others would say little.
            Property::sometimes("a run is lost", |_, state: &State| {
                state.runs.iter().any(|run| run.state == RunState::Lost)
            }),
            Property::sometimes("a session is taken over", |_, state: &State| state.session.epoch > 1),
            Property::sometimes("all runs exit", |_, state: &State| {
                state.runs.iter().all(|run| matches!(run.state, RunState::Exited(_)))
            }),
        ];
        if self.bounds.heals {
            all.push(Property::always("every run ends when the faults do", |model: &Self, state| {
                model.heals(state)
            }));
        }
        all
    }
}

/// Nobody but the holder has a command running in the session. Of a worker that is paused, or was and
/// has not looked since, that cannot be had for sure: it is stopped, a command that it has just begun is not.
fn lives_under_its_lease(state: &State) -> bool {
    state.workers.iter().enumerate().all(|(number, worker)| {
        let lives = worker.runs.iter().any(|run| matches!(run, Local::Living { .. }));
        let other = state.session.holder.is_some_and(|holder| usize::from(holder.worker) != number);
        !lives || worker.is_dazed || !other
    })
}
