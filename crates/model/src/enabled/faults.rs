//! Actions that are possible while the budget lasts: faults, and what operators and callers ask
//! for.

use crate::{
    action::Action,
    local::{LocalLease, LocalRun},
    protocol::Protocol,
    state::{Directory, PROCESSES, RUNS, SESSIONS, State, WORKERS, bit},
    statement::{Call, Stage},
};

impl Protocol {
    /// Adds the faults that the budget still allows.
    pub(crate) fn fault_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let budget = &state.budget;
        for worker in (0..WORKERS).filter(|worker| state.workers[*worker].is_acting()) {
            self.worker_faults(state, worker, actions);
        }
        if budget.broken_connections > 0 {
            let calls = state.calls.iter().enumerate();
            calls.for_each(|(call, broken)| actions.extend(breaks(call, broken)));
        }
        if budget.forward_jumps > 0 {
            actions.push(Action::JumpClock { is_forward: true });
        }
        if budget.backward_jumps > 0 {
            actions.push(Action::JumpClock { is_forward: false });
        }
        if budget.upkeep_crashes > 0 {
            let is_up = |process: &usize| state.stopped_processes & bit(*process) == 0;
            actions
                .extend((0..PROCESSES).filter(is_up).map(|process| Action::StopUpkeep { process }));
        }
        if budget.lost_directories > 0 {
            let all =
                (0..SESSIONS).flat_map(|session| (0..WORKERS).map(move |root| (session, root)));
            let can = all.filter(|(session, root)| can_lose(state, *session, *root));
            actions.extend(can.map(|(session, root)| Action::LoseDirectory { session, root }));
        }
    }

    fn worker_faults(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let budget = &state.budget;
        let now = &state.workers[worker];
        if budget.crashes > 0 {
            actions.push(Action::Crash { worker });
        }
        if budget.pauses > 0 {
            actions.extend([false, true].map(|clock_stops| Action::Pause { worker, clock_stops }));
        }
        if budget.partitions > 0 && !now.is_partitioned {
            actions.push(Action::Partition { worker });
        }
        if budget.worker_jumps > 0 {
            actions.push(Action::JumpWorkerClock { worker });
        }
        if budget.rejections > 0 {
            let is_done = |run: &usize| matches!(now.runs[*run], LocalRun::Done { .. });
            actions
                .extend((0..RUNS).filter(is_done).map(|run| Action::RejectCommit { worker, run }));
        }
    }

    /// Adds what operators and callers may still ask for.
    pub(crate) fn request_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let budget = &state.budget;
        if budget.drains > 0 {
            let can = |worker: &usize| {
                state.workers[*worker].is_acting() && !state.workers[*worker].is_draining
            };
            actions.extend((0..WORKERS).filter(can).map(|worker| Action::Drain { worker }));
        }
        if budget.cancels > 0 {
            let is_live = |run: &usize| state.runs[*run].live.is_some();
            actions.extend((0..RUNS).filter(is_live).map(|run| Action::Cancel { run }));
        }
        if budget.closes > 0 {
            let is_open = |session: &usize| state.sessions[*session].is_open();
            let sessions = (0..self.sessions()).filter(is_open);
            actions.extend(sessions.map(|session| Action::Close { session }));
        }
    }

    fn sessions(&self) -> usize {
        self.bounds.runs.iter().map(|run| run.session + 1).max().unwrap_or(0)
    }
}

/// How a connection can break: a statement that was not executed is lost or continues, an executed
/// one continues, and an answer is lost.
fn breaks(call: usize, broken: &Call) -> Vec<Action> {
    let lost = Action::BreakConnection { call, is_lost: true };
    let continued = Action::BreakConnection { call, is_lost: false };
    match broken.stage {
        Stage::Sent if broken.is_awaited => vec![continued, lost],
        Stage::Sent => vec![lost],
        Stage::Executed(_) if broken.is_awaited => vec![continued],
        Stage::Executed(_) => vec![],
        Stage::Answered(_) => vec![lost],
    }
}

/// Whether the directory exists and no worker holds the session.
fn can_lose(state: &State, session: usize, root: usize) -> bool {
    let is_held = state.workers.iter().any(|worker| worker.leases[session] != LocalLease::None);
    state.directories[session][root] != Directory::Missing && !is_held
}
