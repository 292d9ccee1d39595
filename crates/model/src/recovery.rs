//! Recovery: whether all runs end after the faults stop. From a state, all possible actions are
//! taken in one fair order, followed by a tick, until nothing is left to do.

use crate::{
    action::Action,
    protocol::Protocol,
    state::{SESSIONS, State},
};

/// Enough ticks for leases to expire, be swept and be acquired again.
const MAX_TICKS: usize = 16;
/// Maximum number of actions within one tick.
const MAX_ACTIONS: usize = 60;

impl Protocol {
    /// Whether all runs end and all ended sessions are removed if no further fault happens.
    pub(crate) fn recovers(&self, state: &State) -> bool {
        let mut state = state.clone();
        for _ in 0..MAX_TICKS {
            if self.is_finished(&state) {
                return true;
            }
            self.settle(&mut state);
            let mut time = Vec::new();
            self.time_actions(&state, &mut time);
            time.first().into_iter().for_each(|tick| self.apply(&mut state, (*tick).into()));
        }
        self.is_finished(&state)
    }

    fn is_finished(&self, state: &State) -> bool {
        let is_over =
            |run: usize| state.runs[run].ended.is_some() || !self.is_admissible(state, run);
        let is_removed = |session: usize| {
            state.sessions[session].is_open() || state.sessions[session].is_removed
        };
        let nothing_live = state.runs.iter().all(|run| run.live.is_none());
        nothing_live && (0..self.bounds.runs.len()).all(is_over) && (0..SESSIONS).all(is_removed)
    }

    /// Takes actions without faults in turn, until none is left or the maximum is reached.
    fn settle(&self, state: &mut State) {
        let mut actions = Vec::new();
        for round in 0..MAX_ACTIONS {
            actions.clear();
            self.work_actions(state, &mut actions);
            actions.retain(|action| self.happens_by_itself(state, *action));
            let Some(action) = actions.get(round % actions.len().max(1)) else { return };
            self.apply(state, (*action).into());
        }
    }

    /// Whether an action needs no hint of an api: a worker that looks for work finds a session only
    /// if that waits for one.
    fn happens_by_itself(&self, state: &State, action: Action) -> bool {
        match action {
            Action::Push { is_full, .. } => !is_full,
            Action::Acquire { session, .. } => state.sessions[session].is_waiting,
            _ => true,
        }
    }
}
