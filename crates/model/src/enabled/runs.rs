//! Actions of a worker with a run.

use crate::{
    action::Action,
    local::{Command, LocalLease, LocalRun},
    protocol::Protocol,
    state::State,
    statement::Statement,
};

impl Protocol {
    pub(super) fn run_actions(
        &self,
        state: &State,
        worker: usize,
        run: usize,
        actions: &mut Vec<Action>,
    ) {
        let is_waiting = state.awaits(worker, |statement| run_of(statement) == Some(run));
        let local = state.workers[worker].runs[run];
        match local {
            LocalRun::Assigned { .. } => actions.push(Action::CheckLease { worker, run }),
            LocalRun::Checked { .. } => actions.push(Action::Launch { worker, run }),
            LocalRun::Running(Command { is_kept_alive, has_appended, .. }) => {
                actions.push(Action::Exit { worker, run });
                if !is_kept_alive {
                    actions.push(Action::KeepAlive { worker, run });
                }
                if !has_appended {
                    actions.push(Action::Append { worker, run });
                }
            }
            LocalRun::Done { .. } if !is_waiting => {
                actions.push(Action::SendCommit { worker, run })
            }
            LocalRun::Abandoning { epoch } if !is_waiting => {
                actions.push(Action::SendAbandon { worker, run, epoch });
            }
            LocalRun::HandingBack { turn } if !is_waiting => {
                actions.push(Action::SendHandBack { worker, run, turn });
            }
            LocalRun::Unknown | LocalRun::Uncertain | LocalRun::HandedBack => {
                self.poll_actions(state, worker, run, actions);
            }
            _ => {}
        }
        let live = state.runs[run].live.filter(|live| live.canceled_in.is_some());
        let is_ours = live.and_then(|live| live.assignment).map(|of| of.incarnation)
            == Some(state.incarnation(worker));
        if is_ours && local.canceled() != local && !state.workers[worker].is_partitioned {
            actions.push(Action::NoticeCancel { worker, run });
        }
    }

    /// Adds what the worker's poll finds out about a run.
    fn poll_actions(&self, state: &State, worker: usize, run: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        let session = self.session_of(run);
        if now.is_partitioned || !state.believes_leased(worker) {
            return;
        }
        let me = state.incarnation(worker);
        if let Some(assignment) = state.assignment(run).filter(|of| of.incarnation == me) {
            let is_changing =
                state.awaits(worker, |statement| statement == Statement::Acquire { session });
            if now.runs[run] != LocalRun::HandedBack && (!is_changing || now.is_draining) {
                actions.push(Action::TakeAssigned { worker, run, epoch: assignment.epoch });
            }
        }
        let row = state.sessions[session];
        let is_takeable = state.is_queued(run) && row.holder == Some(me) && row.is_open();
        if let (true, LocalLease::Held(epoch)) =
            (is_takeable && !now.is_draining, now.leases[session])
        {
            actions.push(Action::TakeQueued { worker, run, epoch });
        }
    }
}

fn run_of(statement: Statement) -> Option<usize> {
    match statement {
        Statement::Append { run, .. }
        | Statement::Commit { run, .. }
        | Statement::Abandon { run, .. }
        | Statement::HandBack { run, .. } => Some(run),
        _ => None,
    }
}
