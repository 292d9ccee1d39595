//! The model that is checked: the protocol or a broken variant, within bounds.

use stateright::{Model, Property};

use crate::{
    action::{Action, Step},
    bounds::Bounds,
    properties,
    state::State,
};

pub use crate::variant::Variant;

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
        vec![State::first(self.bounds.budget)]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let mut actions = Vec::new();
        if state.time < self.bounds.ticks {
            self.time_actions(state, &mut actions);
        }
        self.fault_actions(state, &mut actions);
        self.request_actions(state, &mut actions);
        self.work_actions(state, &mut actions);
        let slow = actions.iter().filter(|action| may_be_slow(state, **action));
        steps.extend(slow.map(|action| Step { action: *action, is_slow: true }));
        steps.extend(actions.into_iter().map(Step::from));
    }

    fn next_state(&self, state: &State, action: Step) -> Option<State> {
        let mut next = state.clone();
        self.apply(&mut next, action);
        // The order of the calls does not matter. Sorting them merges equal states.
        next.calls.sort_by_key(|call| (call.statement, call.by));
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all(self)
    }
}

fn may_be_slow(state: &State, action: Action) -> bool {
    let is_task = action.upkeep().is_some();
    let budget = if is_task { state.budget.slow_tasks } else { state.budget.slow_calls };
    budget > 0 && action.sends()
}
