//! What each action does to the state.

use crate::{
    action::{Action, Step},
    protocol::Protocol,
    state::{Incarnation, LocalLease, LocalRun, Pause, State},
    statement::{Stage, Statement},
};

impl Protocol {
    /// Applies one step, and advances all calls that are not slow to their end.
    pub(crate) fn apply(&self, state: &mut State, Step { action, is_slow }: Step) {
        let before = state.calls.len();
        self.apply_action(state, action);
        if is_slow && let Some(sent) = state.calls.get_mut(before) {
            state.budget.slow_calls -= 1;
            sent.is_slow = true;
            // A slow renewal may lose a lease.
            state.history.had_fault |= matches!(action, Action::Renew { .. });
        }
        self.advance_fast(state);
    }

    fn apply_action(&self, state: &mut State, action: Action) {
        match action {
            Action::Tick => tick(state),
            Action::Crash { .. }
            | Action::Pause { .. }
            | Action::LoseTick { .. }
            | Action::Partition { .. }
            | Action::BreakConnection { .. } => {
                state.history.had_fault = true;
                self.apply_fault(state, action);
            }
            Action::Reconnect { worker } => state.workers[worker].is_partitioned = false,
            Action::Drain { worker } => {
                state.budget.drains -= 1;
                state.workers[worker].is_draining = true;
                state.rows[worker].is_ready = false;
            }
            Action::Resume { worker } => {
                let was_frozen = state.workers[worker].pause == Pause::Frozen;
                state.workers[worker].pause = Pause::No;
                state.workers[worker].has_unchecked_pause = was_frozen || !state.believes_leased(worker);
            }
            Action::Restart { worker } => {
                state.workers[worker].is_up = true;
                state.workers[worker].is_draining = false;
                state.workers[worker].lag = 0;
            }
            Action::Insert { run } => {
                state.send(Incarnation { worker: 0, number: 0 }, Statement::Insert { run })
            }
            Action::Push { run, is_full } => {
                state.budget.full_pushes -= u8::from(is_full);
                self.take_push(state, run, is_full);
            }
            Action::Sweep => self.sweep(state),
            Action::Advance { call } => self.advance(state, call),
            _ => self.apply_work(state, action),
        }
    }

    /// Advances all calls that are not slow until none can advance.
    fn advance_fast(&self, state: &mut State) {
        loop {
            // A call that no worker waits for is finished when it is answered.
            state.calls.retain(|call| {
                (call.is_awaited && !call.is_insert()) || !matches!(call.stage, Stage::Answered(_))
            });
            let can = |call: usize| !state.calls[call].is_slow && self.can_advance(state, call);
            match (0..state.calls.len()).find(|call| can(*call)) {
                Some(call) => self.advance(state, call),
                None => return,
            }
        }
    }

    /// Whether a call can advance to its next stage.
    pub(crate) fn can_advance(&self, state: &State, call: usize) -> bool {
        let call = &state.calls[call];
        let worker = &state.workers[usize::from(call.by.worker)];
        let is_connected = call.is_insert() || !call.is_awaited || !worker.is_partitioned;
        match call.stage {
            Stage::Sent => is_connected && !self.must_wait(state, call),
            Stage::Executed { .. } => true,
            Stage::Answered(_) => is_connected && worker.is_running(),
        }
    }

    fn advance(&self, state: &mut State, call: usize) {
        match state.calls[call].stage {
            Stage::Sent => self.execute(state, call),
            Stage::Executed { .. } => self.commit(state, call),
            Stage::Answered(answer) => {
                let call = state.calls.remove(call);
                self.receive(state, call, answer);
            }
        }
    }

    fn apply_fault(&self, state: &mut State, action: Action) {
        match action {
            Action::Crash { worker } => {
                state.budget.crashes -= 1;
                state.end_incarnation(worker);
                state.workers[worker].is_up = false;
            }
            Action::Pause { worker, clock_stops } => {
                state.budget.pauses -= 1;
                state.workers[worker].pause = if clock_stops { Pause::Frozen } else { Pause::Stopped };
                state.workers[worker].has_unchecked_pause = true;
                let number = crate::worker::index(worker);
                let sent = state.calls.iter_mut().filter(|call| call.by.worker == number);
                sent.for_each(|call| call.predates_pause = true);
            }
            Action::Partition { worker } => {
                state.budget.partitions -= 1;
                state.workers[worker].is_partitioned = true;
            }
            Action::LoseTick { worker } => {
                state.budget.lost_ticks -= 1;
                state.workers[worker].lag += 1;
                tick(state);
            }
            Action::BreakConnection { call, is_lost } => {
                state.budget.broken_connections -= 1;
                let cut = state.calls[call];
                self.fail(state, cut);
                state.calls[call].is_awaited = false;
                if is_lost {
                    state.calls.remove(call);
                }
            }
            _ => {}
        }
    }

    fn apply_work(&self, state: &mut State, action: Action) {
        match action {
            Action::Register { worker } => state.register(worker),
            Action::Renew { worker } => {
                let sent = state.clock(worker);
                state.send(state.incarnation(worker), Statement::Renew { sent });
            }
            Action::Fence { worker } => state.end_incarnation(worker),
            Action::Acquire { worker } => state.send(state.incarnation(worker), Statement::Acquire),
            Action::Release { worker, epoch } => {
                state.workers[worker].lease = LocalLease::Releasing(epoch);
                state.send(state.incarnation(worker), Statement::Release { epoch });
            }
            Action::Leave { worker } => self.leave(state, worker),
            Action::TakeAssigned { worker, run, epoch } => self.take_assigned(state, worker, run, epoch),
            Action::TakeQueued { worker, run, epoch } => {
                state.workers[worker].runs[run] = LocalRun::Beginning;
                state.send(state.incarnation(worker), Statement::Begin { run, epoch });
            }
            Action::CheckLease { worker, run } => self.check_lease(state, worker, run),
            Action::Launch { worker, run } => {
                if let LocalRun::Checked { epoch } = state.workers[worker].runs[run] {
                    state.history.starts[run] += 1;
                    state.workers[worker].runs[run] = LocalRun::Running { epoch };
                }
            }
            Action::Exit { worker, run } => {
                if let LocalRun::Running { epoch } = state.workers[worker].runs[run] {
                    state.workers[worker].runs[run] = LocalRun::Done { epoch };
                }
            }
            Action::SendCommit { worker, run, epoch } => {
                state.send(state.incarnation(worker), Statement::Commit { run, epoch })
            }
            Action::SendHandBack { worker, run, turn } => {
                state.send(state.incarnation(worker), Statement::HandBack { run, turn })
            }
            _ => {}
        }
    }
}

fn tick(state: &mut State) {
    state.now += 1;
    for worker in state.workers.iter_mut().filter(|worker| worker.pause == Pause::Frozen) {
        worker.lag += 1;
    }
}
