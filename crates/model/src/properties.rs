//! Properties: what must hold in every state, and what some state must show.

use stateright::Property;

use crate::{
    local::{Command, LocalRun, Worker},
    protocol::Protocol,
    state::{Outcome, RUNS, State},
};

/// The properties of the protocol and its bounds.
pub(crate) fn all(protocol: &Protocol) -> Vec<Property<Protocol>> {
    let mut all = vec![
        Property::always(
            "only the lease holder has a running sandbox",
            |protocol: &Protocol, state| {
                (0..RUNS).all(|run| protocol.only_holder_runs(state, run, is_exempt))
            },
        ),
        Property::always("no worker commits without holding the lease", |_, state: &State| {
            !state.past.stale_commit
        }),
        Property::always("a run gets one outcome", |_, state: &State| {
            state.past.outcomes.iter().all(|times| *times <= 1)
        }),
        Property::always(
            "a recorded run is live or ended, never both or neither",
            |_, state: &State| {
                state.runs.iter().enumerate().all(|(run, row)| {
                    let tables = u8::from(row.live.is_some()) + u8::from(row.ended.is_some());
                    tables == (state.past.recorded >> run) & 1
                })
            },
        ),
        Property::always(
            "a run starts again only if retries are allowed",
            |protocol: &Protocol, state: &State| {
                let starts = state.past.starts.iter().zip(&protocol.bounds.runs);
                starts.into_iter().all(|(starts, run)| *starts <= 1 + run.retries)
            },
        ),
        Property::always("no run is lost without a fault", |_, state: &State| {
            state.past.had_fault || state.runs.iter().all(|run| !run.has_outcome(Outcome::Lost))
        }),
        Property::always("a run is taken only from a dead worker", |_, state: &State| {
            !state.past.took_live_run
        }),
        Property::always("no stored result is reported as refused", |_, state: &State| {
            !state.past.refused_stored_result
        }),
        Property::always("a canceled run is not tried again", |_, state: &State| {
            let live = state.runs.iter().filter_map(|run| run.live);
            live.into_iter().all(|run| run.canceled_in.is_none_or(|attempt| attempt == run.attempt))
        }),
        Property::always(
            "an idempotency key names one run",
            |protocol: &Protocol, state: &State| {
                !protocol.bounds.same_key || state.past.recorded.count_ones() <= 1
            },
        ),
        Property::always("stored output is of one attempt", |_, state: &State| {
            state.runs.iter().all(|run| run.output.count_ones() <= 1)
        }),
    ];
    all.extend(of_sessions());
    all.extend(reached());
    if protocol.bounds.check_recovery {
        all.push(Property::always(
            "every run ends after the faults stop",
            |protocol: &Protocol, state| protocol.recovers(state),
        ));
    }
    all
}

fn of_sessions() -> [Property<Protocol>; 4] {
    [
        Property::always("expiry ends no session with an unfinished run", |_, state: &State| {
            !state.past.expired_busy_session
        }),
        Property::always("a command finds the files of earlier ones", |_, state: &State| {
            !state.past.missed_files
        }),
        Property::always("a session ends as lost only without its files", |_, state: &State| {
            !state.past.ended_with_files
        }),
        Property::always("no command runs in a removed directory", |_, state: &State| {
            !state.past.missed_directory
        }),
    ]
}

/// These show that the interesting states are reached.
fn reached() -> [Property<Protocol>; 9] {
    [
        Property::sometimes("a run is lost", |_, state: &State| has_any(state, Outcome::Lost)),
        Property::sometimes("a run is canceled", |_, state: &State| {
            has_any(state, Outcome::Canceled)
        }),
        Property::sometimes("a run is refused", |_, state: &State| {
            has_any(state, Outcome::Refused)
        }),
        Property::sometimes("a run is retried", |_, state: &State| {
            state.past.starts.iter().any(|starts| *starts > 1)
        }),
        Property::sometimes("all runs exit", |protocol: &Protocol, state: &State| {
            let runs = &state.runs[..protocol.bounds.runs.len()];
            runs.iter().all(|run| run.has_outcome(Outcome::Exited))
        }),
        Property::sometimes("another worker takes over the session", |_, state: &State| {
            state.sessions.iter().any(|session| session.epoch > 1)
        }),
        Property::sometimes("an ended session is removed", |_, state: &State| {
            state.sessions.iter().any(|session| session.is_removed && session.home.is_some())
        }),
        Property::sometimes(
            "a clock jump lets two workers run",
            |protocol: &Protocol, state: &State| {
                let is_taken = |run| !protocol.only_holder_runs(state, run, |_, _| false);
                state.now != state.time && (0..RUNS).any(is_taken)
            },
        ),
        Property::sometimes("the upkeep has a new owner", |_, state: &State| {
            state.upkeep.owner > 0
        }),
    ]
}

fn has_any(state: &State, outcome: Outcome) -> bool {
    state.runs.iter().any(|run| run.has_outcome(outcome))
}

impl Protocol {
    /// Whether only the lease holder runs the command of this run.
    fn only_holder_runs(
        &self,
        state: &State,
        run: usize,
        is_exempt: impl Fn(&Worker, Command) -> bool,
    ) -> bool {
        let holder = state.sessions[self.session_of(run)].holder;
        state.workers.iter().enumerate().all(|(number, worker)| {
            let LocalRun::Running(command) = worker.runs[run] else { return true };
            let is_taken = holder.is_some_and(|holder| holder.worker != number);
            !is_taken || is_exempt(worker, command)
        })
    }
}

/// No lease covers a command whose worker was paused just after it started, and none covers a clock
/// that stops or jumps until the worker has checked its lease again.
pub(crate) fn is_exempt(worker: &Worker, command: Command) -> bool {
    worker.has_unchecked_clock || (worker.has_unchecked_pause && !command.is_kept_alive)
}
