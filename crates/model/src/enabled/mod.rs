//! Which actions are possible in a state.

mod faults;
mod leases;
mod runs;

use crate::{
    action::Action,
    local::{Command, LocalRun, Pause},
    protocol::{Protocol, Variant},
    state::{MARGIN, PROCESSES, RUNS, State, TTL, WORKERS, bit},
    statement::{Sender, Statement},
};

impl Protocol {
    /// Adds the actions that let time pass. None is possible while a worker is due to renew or to
    /// fence itself, or a sandbox to end: these take less than a tick.
    pub(crate) fn time_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let must_end = |worker| (0..RUNS).any(|run| self.must_kill(state, worker, run));
        let must_act = |worker| {
            self.must_fence(state, worker) || self.must_renew(state, worker) || must_end(worker)
        };
        if (0..WORKERS).any(must_act) {
            return;
        }
        actions.push(Action::Tick);
        if state.budget.lost_ticks > 0 {
            actions.extend((0..WORKERS).map(|worker| Action::LoseTick { worker }));
        }
    }

    /// Adds the actions that need neither a fault nor time.
    pub(crate) fn work_actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.network_actions(state, actions);
        for worker in 0..WORKERS {
            self.worker_actions(state, worker, actions);
        }
        for run in 0..self.bounds.runs.len() {
            let is_sent =
                state.calls.iter().any(|call| call.statement == Statement::Insert { run });
            if !is_sent && self.is_admissible(state, run) {
                actions.push(Action::Insert { run });
            }
        }
        self.upkeep_actions(state, actions);
    }

    fn network_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let can = |call: &usize| self.can_advance(state, *call);
        actions.extend((0..state.calls.len()).filter(can).map(|call| Action::Advance { call }));
        for (run, push) in state.pushes.iter().enumerate() {
            let Some(push) = push else { continue };
            if state.workers[push.assignment.incarnation.worker].is_running() {
                actions.push(Action::Push { run, is_full: false });
                if state.budget.full_pushes > 0 {
                    actions.push(Action::Push { run, is_full: true });
                }
            }
        }
    }

    /// A process does a task of the upkeep if there is something to do.
    fn upkeep_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let processes = if self.bounds.two_upkeep_processes { PROCESSES } else { 1 };
        for process in 0..processes {
            let is_stopped = state.stopped_processes & bit(process) != 0;
            let is_waiting = state
                .calls
                .iter()
                .any(|call| call.is_awaited && call.by == Sender::Upkeep(process));
            if is_stopped || is_waiting || !self.may_own_upkeep(state, process) {
                continue;
            }
            let tasks = [
                Action::Sweep { process },
                Action::ExpireSessions { process },
                Action::ExpireQueued { process },
            ];
            let is_due = |task: &Action| {
                task.upkeep()
                    .is_some_and(|(_, statement)| self.upkeep_effect(state, statement).is_ok())
            };
            actions.extend(tasks.into_iter().filter(is_due));
        }
    }

    fn worker_actions(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if now.is_partitioned {
            actions.push(Action::Reconnect { worker });
        }
        let ended = (0..RUNS).filter(|run| self.must_kill(state, worker, *run));
        actions.extend(ended.map(|run| Action::KillUnattended { worker, run }));
        if now.pause != Pause::No {
            return actions.push(Action::Resume { worker });
        }
        if !now.is_up {
            return actions.push(Action::Restart { worker });
        }
        if now.incarnation == 0 {
            let is_registering =
                state.awaits(worker, |statement| matches!(statement, Statement::Register { .. }));
            if !now.is_partitioned && !is_registering {
                actions.push(Action::Register { worker });
            }
            return;
        }
        if self.must_fence(state, worker) {
            actions.push(Action::Fence { worker });
        }
        if self.must_renew(state, worker) {
            actions.push(Action::Renew { worker });
        }
        self.lease_actions(state, worker, actions);
        for run in 0..self.bounds.runs.len() {
            self.run_actions(state, worker, run, actions);
        }
    }

    fn must_fence(&self, state: &State, worker: usize) -> bool {
        let is_expired = state.workers[worker].is_acting() && !state.believes_leased(worker);
        is_expired && !self.is(Variant::NoSelfFencing)
    }

    /// Whether `codelia-init` must kill a command, because its worker is stopped and has not
    /// extended its time. A worker that is not stopped kills it itself.
    fn must_kill(&self, state: &State, worker: usize, run: usize) -> bool {
        let now = &state.workers[worker];
        let knows_end =
            matches!(now.runs[run], LocalRun::Running(Command { is_kept_alive: true, .. }));
        knows_end
            && now.pause == Pause::Stopped
            && !state.believes_leased(worker)
            && !self.is(Variant::NoKeepAlive)
    }

    /// Whether a tick passed since the worker's last renewal.
    fn must_renew(&self, state: &State, worker: usize) -> bool {
        let now = &state.workers[worker];
        let is_renewing =
            || state.awaits(worker, |statement| matches!(statement, Statement::Renew { .. }));
        let margin = if self.is(Variant::NoMargin) { 0 } else { MARGIN };
        now.is_running()
            && state.believes_leased(worker)
            && !now.is_partitioned
            && state.clock(worker) + TTL > now.valid_until + margin
            && !is_renewing()
    }
}
