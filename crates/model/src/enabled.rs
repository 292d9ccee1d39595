//! Which actions are possible in a state.

use crate::{
    action::Action,
    protocol::{Protocol, Variant},
    state::{LocalLease, LocalRun, MARGIN, Pause, RunState, State, TTL, WORKERS},
    statement::{Lock, Stage, Statement},
};

impl Protocol {
    /// Adds the actions that let time pass. None is possible while a worker is due to renew or to
    /// fence itself: both take less than a tick.
    pub(crate) fn time_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let must_act = |worker| self.must_fence(state, worker) || must_renew(state, worker);
        if (0..WORKERS).any(must_act) {
            return;
        }
        actions.push(Action::Tick);
        if state.budget.lost_ticks > 0 {
            actions.extend((0..WORKERS).map(|worker| Action::LoseTick { worker }));
        }
    }

    fn must_fence(&self, state: &State, worker: usize) -> bool {
        let now = &state.workers[worker];
        now.is_running()
            && now.incarnation > 0
            && !state.believes_leased(worker)
            && !self.is(Variant::NoSelfFencing)
    }

    /// Adds the faults that the budget still allows.
    pub(crate) fn fault_actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (worker, now) in
            state.workers.iter().enumerate().filter(|(_, now)| now.is_running() && now.incarnation > 0)
        {
            if state.budget.crashes > 0 {
                actions.push(Action::Crash { worker });
            }
            if state.budget.pauses > 0 {
                actions.extend([false, true].map(|clock_stops| Action::Pause { worker, clock_stops }));
            }
            if state.budget.partitions > 0 && !now.is_partitioned {
                actions.push(Action::Partition { worker });
            }
            if state.budget.drains > 0 && !now.is_draining {
                actions.push(Action::Drain { worker });
            }
        }
        if state.budget.broken_connections == 0 {
            return;
        }
        for (index, call) in state.calls.iter().enumerate().filter(|(_, call)| call.is_awaited) {
            match call.stage {
                Stage::Sent => {
                    actions.extend(
                        [false, true].map(|is_lost| Action::BreakConnection { call: index, is_lost }),
                    );
                }
                Stage::Executed { .. } => {
                    actions.push(Action::BreakConnection { call: index, is_lost: false })
                }
                Stage::Answered(_) => actions.push(Action::BreakConnection { call: index, is_lost: true }),
            }
        }
    }

    /// Adds the actions that need neither a fault nor time.
    pub(crate) fn work_actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.network_actions(state, actions);
        for worker in 0..WORKERS {
            self.worker_actions(state, worker, actions);
        }
        for run in 0..state.runs.len() {
            let is_new = !state.calls.iter().any(|call| call.statement == Statement::Insert { run });
            if state.runs[run].state == RunState::Absent && is_new {
                actions.push(Action::Insert { run });
            }
        }
        let mut swept = state.clone();
        self.sweep(&mut swept);
        if swept != *state {
            actions.push(Action::Sweep);
        }
    }

    fn network_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let can = |call: &usize| self.can_advance(state, *call);
        actions.extend((0..state.calls.len()).filter(can).map(|call| Action::Advance { call }));
        for (run, push) in state.pushes.iter().enumerate() {
            let Some(push) = push else { continue };
            if state.workers[usize::from(push.assignment.incarnation.worker)].is_running() {
                actions.push(Action::Push { run, is_full: false });
                if state.budget.full_pushes > 0 {
                    actions.push(Action::Push { run, is_full: true });
                }
            }
        }
    }

    fn worker_actions(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if now.is_partitioned {
            actions.push(Action::Reconnect { worker });
        }
        if now.pause != Pause::No {
            return actions.push(Action::Resume { worker });
        }
        if !now.is_up {
            return actions.push(Action::Restart { worker });
        }
        if now.incarnation == 0 {
            if !now.is_partitioned && !state.is_locked(Lock::Worker(crate::worker::index(worker))) {
                actions.push(Action::Register { worker });
            }
            return;
        }
        if self.must_fence(state, worker) {
            actions.push(Action::Fence { worker });
        }
        self.lease_actions(state, worker, actions);
        for run in 0..state.runs.len() {
            self.run_actions(state, worker, run, actions);
        }
    }

    fn lease_actions(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if must_renew(state, worker) {
            actions.push(Action::Renew { worker });
        }
        let is_changing = state
            .awaits(worker, |statement| matches!(statement, Statement::Acquire | Statement::Release { .. }));
        let is_busy = now.runs.iter().any(|run| run.is_active());
        let holds = state.session.holder == Some(state.incarnation(worker));
        match now.lease {
            _ if is_changing || now.is_partitioned => {}
            LocalLease::None if now.is_draining && !holds && !is_busy => {
                actions.push(Action::Leave { worker })
            }
            LocalLease::None if holds => actions.push(Action::Release { worker, epoch: state.session.epoch }),
            LocalLease::None
                if state.believes_leased(worker) && state.live_holder().is_none() && !now.is_draining =>
            {
                actions.push(Action::Acquire { worker });
            }
            LocalLease::Held(epoch) if now.is_draining && !is_busy => {
                actions.push(Action::Release { worker, epoch })
            }
            LocalLease::Releasing(epoch) => actions.push(Action::Release { worker, epoch }),
            LocalLease::None | LocalLease::Held(_) => {}
        }
    }

    fn run_actions(&self, state: &State, worker: usize, run: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        let can_send = |is: fn(Statement) -> Option<usize>| {
            !state.awaits(worker, |statement| is(statement) == Some(run))
        };
        match now.runs[run] {
            LocalRun::Assigned { .. } => actions.push(Action::CheckLease { worker, run }),
            LocalRun::Checked { .. } => actions.push(Action::Launch { worker, run }),
            LocalRun::Running { .. } => actions.push(Action::Exit { worker, run }),
            LocalRun::Done { epoch } if can_send(committed) => {
                actions.push(Action::SendCommit { worker, run, epoch })
            }
            LocalRun::HandingBack { turn } if can_send(handed_back) => {
                actions.push(Action::SendHandBack { worker, run, turn });
            }
            LocalRun::Unknown | LocalRun::Uncertain | LocalRun::HandedBack => {
                self.poll_actions(state, worker, run, actions)
            }
            LocalRun::Done { .. } | LocalRun::HandingBack { .. } | LocalRun::Beginning | LocalRun::Ended => {}
        }
    }

    /// Adds what the worker's poll finds out about a run.
    fn poll_actions(&self, state: &State, worker: usize, run: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if now.is_partitioned || !state.believes_leased(worker) {
            return;
        }
        match state.runs[run].state {
            RunState::Running(assignment)
                if assignment.incarnation == state.incarnation(worker)
                    && now.runs[run] != LocalRun::HandedBack =>
            {
                let is_changing = state.awaits(worker, |statement| statement == Statement::Acquire);
                if !is_changing || now.is_draining {
                    actions.push(Action::TakeAssigned { worker, run, epoch: assignment.epoch });
                }
            }
            RunState::Queued
                if state.session.holder == Some(state.incarnation(worker)) && !now.is_draining =>
            {
                if let LocalLease::Held(epoch) = now.lease {
                    actions.push(Action::TakeQueued { worker, run, epoch });
                }
            }
            _ => {}
        }
    }
}

/// Whether a tick passed since the worker's last renewal.
fn must_renew(state: &State, worker: usize) -> bool {
    let now = &state.workers[worker];
    let is_renewing = || state.awaits(worker, |statement| matches!(statement, Statement::Renew { .. }));
    now.is_running()
        && state.believes_leased(worker)
        && !now.is_partitioned
        && state.clock(worker) + TTL > now.valid_until + MARGIN
        && !is_renewing()
}

fn committed(statement: Statement) -> Option<usize> {
    if let Statement::Commit { run, .. } = statement { Some(run) } else { None }
}

fn handed_back(statement: Statement) -> Option<usize> {
    if let Statement::HandBack { run, .. } = statement { Some(run) } else { None }
}
