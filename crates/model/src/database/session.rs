//! The table `sessions`, without its leases.

use super::{lease::assignment, sweep::end_runs};
use crate::{
    protocol::Protocol,
    state::{Directory, EndReason, Incarnation, Mask, Outcome, RUNS, State, bit, mask},
    statement::{Answer, Effect, Statement},
};

impl Protocol {
    /// The session of a run.
    pub(crate) fn session_of(&self, run: usize) -> usize {
        self.bounds.runs.get(run).map_or(0, |run| run.session)
    }

    /// Whether a session is open and before its expiry.
    pub(crate) fn is_usable(&self, state: &State, session: usize) -> bool {
        state.sessions[session].is_open() && self.bounds.expires_at.is_none_or(|at| state.now < at)
    }

    /// Whether a session has a run that has not ended.
    pub(crate) fn has_live_run(&self, state: &State, session: usize) -> bool {
        (0..RUNS).any(|run| self.session_of(run) == session && state.runs[run].live.is_some())
    }

    fn has_running_run(&self, state: &State, session: usize) -> bool {
        (0..RUNS).any(|run| self.session_of(run) == session && state.assignment(run).is_some())
    }

    pub(super) fn queued_runs(&self, state: &State, session: usize) -> Mask {
        mask(RUNS, |run| self.session_of(run) == session && state.is_queued(run))
    }

    /// Closing a session cancels its queued runs. The holder ends the running ones.
    pub(super) fn close_effect(&self, state: &State, session: usize) -> Result<Effect, Answer> {
        if !state.sessions[session].is_open() {
            return Err(Answer::Done);
        }
        Ok(Effect {
            sessions: bit(session),
            runs: self.queued_runs(state, session),
            ..Effect::default()
        })
    }

    /// The effect of a statement of the holder of a session.
    pub(super) fn session_effect(
        &self,
        state: &State,
        by: Incarnation,
        statement: Statement,
    ) -> Result<Effect, Answer> {
        match statement {
            Statement::Release { session, epoch } => {
                let is_held = state.sessions[session].is_held_under(assignment(by, epoch));
                if !is_held {
                    return Err(Answer::Refused);
                }
                if self.has_running_run(state, session) {
                    return Err(Answer::Busy);
                }
                Ok(Effect { sessions: bit(session), ..Effect::default() })
            }
            Statement::EndDataLost { session, epoch } => {
                let row = state.sessions[session];
                if !(row.is_open() && row.is_held_under(assignment(by, epoch))) {
                    return Err(Answer::Done);
                }
                let runs = self.queued_runs(state, session);
                Ok(Effect { sessions: bit(session), runs, ..Effect::default() })
            }
            Statement::MarkRemoved { session } => {
                let row = state.sessions[session];
                let is_due =
                    !row.is_open() && !row.is_removed && row.home == Some(self.root(by.worker));
                if !is_due || self.has_running_run(state, session) {
                    return Err(Answer::Refused);
                }
                Ok(Effect { sessions: bit(session), ..Effect::default() })
            }
            _ => Err(Answer::Refused),
        }
    }
}

pub(super) fn commit_close(state: &mut State, session: usize, effect: Effect) {
    end_session(state, session, EndReason::Closed);
    end_runs(state, effect.runs, Outcome::Canceled);
}

pub(super) fn commit_data_lost(state: &mut State, session: usize, effect: Effect) {
    state.past.ended_with_files |= state.directories[session].contains(&Directory::HasFiles);
    state.sessions[session].end = Some(EndReason::DataLost);
    state.sessions[session].is_waiting = false;
    end_runs(state, effect.runs, Outcome::Refused);
}

/// Ends a session. One that was never leased has no directory to remove.
pub(super) fn end_session(state: &mut State, session: usize, reason: EndReason) {
    let row = &mut state.sessions[session];
    row.end = Some(reason);
    row.is_waiting = false;
    row.is_removed = row.home.is_none();
}
