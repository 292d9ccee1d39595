//! Whether everything comes to its end once the faults stop: from a state, the rest is played to its
//! end in one fair order, every step that can be made in turn, then a tick.

use crate::{action::Action, protocol::Protocol, state::State};

/// Ticks that may pass: leases run out, are swept, and are taken again.
const TICKS: usize = 16;
/// Steps in one tick.
const STEPS: usize = 60;

impl Protocol {
    pub(crate) fn heals(&self, state: &State) -> bool {
        let mut state = state.clone();
        for _ in 0..TICKS {
            if state.all_ended() {
                return true;
            }
            self.settle(&mut state);
            let mut time = Vec::new();
            self.time(&state, &mut time);
            time.first().into_iter().for_each(|tick| self.apply(&mut state, (*tick).into()));
        }
        state.all_ended()
    }

    /// Makes steps without a fault, in turn, until none is left or they only go round in a circle.
    fn settle(&self, state: &mut State) {
        let mut steps = Vec::new();
        for turn in 0..STEPS {
            steps.clear();
            self.steps(state, &mut steps);
            steps.retain(|step| !matches!(step, Action::Push { is_full: true, .. }));
            let Some(step) = steps.get(turn % steps.len().max(1)) else { return };
            self.apply(state, (*step).into());
        }
    }
}
