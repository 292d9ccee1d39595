//! Recovery: whether all runs end after the faults stop. From a state, all possible actions are
//! taken in one fair order, followed by a tick, until every run has ended.

use crate::{action::Action, protocol::Protocol, state::State};

/// Enough ticks for leases to expire, be swept and be acquired again.
const MAX_TICKS: usize = 16;
/// Maximum number of actions within one tick.
const MAX_ACTIONS: usize = 60;

impl Protocol {
    /// Whether all runs end if no further fault happens.
    pub(crate) fn recovers(&self, state: &State) -> bool {
        let mut state = state.clone();
        for _ in 0..MAX_TICKS {
            if state.all_ended() {
                return true;
            }
            self.settle(&mut state);
            let mut time = Vec::new();
            self.time_actions(&state, &mut time);
            time.first().into_iter().for_each(|tick| self.apply(&mut state, (*tick).into()));
        }
        state.all_ended()
    }

    /// Takes actions without faults in turn, until none is left or the maximum is reached.
    fn settle(&self, state: &mut State) {
        let mut actions = Vec::new();
        for turn in 0..MAX_ACTIONS {
            actions.clear();
            self.work_actions(state, &mut actions);
            actions.retain(|action| !matches!(action, Action::Push { is_full: true, .. }));
            let Some(action) = actions.get(turn % actions.len().max(1)) else { return };
            self.apply(state, (*action).into());
        }
    }
}
