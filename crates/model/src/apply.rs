//! The effect of each action on the state.

use crate::{
    action::{Action, Step},
    local::{LocalLease, LocalRun, Pause},
    protocol::Protocol,
    state::{JUMP, State, bit},
    statement::{Sender, Stage, Statement},
};

impl Protocol {
    /// Applies one step, and advances all calls that are not slow to their end.
    pub(crate) fn apply(&self, state: &mut State, Step { action, is_slow }: Step) {
        let before = state.calls.len();
        self.apply_action(state, action);
        if is_slow && let Some(sent) = state.calls.get_mut(before) {
            sent.is_slow = true;
            let is_task = action.upkeep().is_some();
            state.budget.slow_tasks -= u8::from(is_task);
            state.budget.slow_calls -= u8::from(!is_task);
            // A slow renewal or registration may lose a lease.
            let risks_lease = matches!(action, Action::Renew { .. } | Action::Register { .. });
            state.past.had_fault |= risks_lease;
        }
        self.advance_fast(state);
    }

    fn apply_action(&self, state: &mut State, action: Action) {
        match action {
            Action::Tick => tick(state),
            Action::Crash { .. }
            | Action::Pause { .. }
            | Action::Partition { .. }
            | Action::LoseTick { .. }
            | Action::JumpWorkerClock { .. }
            | Action::JumpClock { .. }
            | Action::BreakConnection { .. }
            | Action::RejectCommit { .. }
            | Action::LoseDirectory { .. }
            | Action::StopUpkeep { .. } => {
                state.past.had_fault = true;
                self.apply_fault(state, action);
            }
            Action::Reconnect { worker } => state.workers[worker].is_partitioned = false,
            Action::Resume { worker } => resume(state, worker),
            Action::Restart { worker } => {
                let now = &mut state.workers[worker];
                (now.is_up, now.is_draining, now.lag) = (true, false, 0);
            }
            Action::KillUnattended { worker, run } => {
                state.workers[worker].runs[run] = LocalRun::Killed
            }
            Action::Drain { worker } => {
                state.budget.drains -= 1;
                state.workers[worker].is_draining = true;
                state.rows[worker].is_ready = false;
            }
            Action::Insert { run } => state.send(Sender::Caller, Statement::Insert { run }),
            Action::Cancel { run } => {
                state.budget.cancels -= 1;
                state.send(Sender::Caller, Statement::Cancel { run });
            }
            Action::Close { session } => {
                state.budget.closes -= 1;
                state.send(Sender::Caller, Statement::Close { session });
            }
            Action::Push { run, is_full } => {
                state.budget.full_pushes -= u8::from(is_full);
                self.take_push(state, run, is_full);
            }
            Action::Advance { call } => self.advance(state, call),
            _ => match action.upkeep() {
                Some((process, statement)) => {
                    self.own_upkeep(state, process);
                    state.send(Sender::Upkeep(process), statement);
                }
                None => self.apply_work(state, action),
            },
        }
    }

    fn advance_fast(&self, state: &mut State) {
        loop {
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
        let worker = call.worker().map(|worker| &state.workers[worker]);
        let is_connected = !call.is_awaited || worker.is_none_or(|worker| !worker.is_partitioned);
        match call.stage {
            Stage::Sent => is_connected && !self.must_wait(state, call),
            Stage::Executed(_) => true,
            Stage::Answered(_) => is_connected && worker.is_none_or(|worker| worker.is_running()),
        }
    }

    fn advance(&self, state: &mut State, index: usize) {
        match state.calls[index].stage {
            Stage::Sent => self.execute(state, index),
            Stage::Executed(_) => self.commit(state, index),
            Stage::Answered(answer) => {
                let call = state.calls.remove(index);
                return self.receive(state, call, answer);
            }
        }
        let call = &state.calls[index];
        let is_awaited = call.is_awaited && call.worker().is_some();
        if matches!(call.stage, Stage::Answered(_)) && !is_awaited {
            state.calls.remove(index);
        }
    }

    fn apply_fault(&self, state: &mut State, action: Action) {
        match action {
            Action::Crash { worker } => {
                state.budget.crashes -= 1;
                state.end_incarnation(worker);
                state.workers[worker].is_up = false;
            }
            Action::Pause { worker, clock_stops } => pause(state, worker, clock_stops),
            Action::Partition { worker } => {
                state.budget.partitions -= 1;
                state.workers[worker].is_partitioned = true;
            }
            Action::LoseTick { worker } => {
                state.budget.lost_ticks -= 1;
                state.workers[worker].lag += 1;
                tick(state);
            }
            Action::JumpWorkerClock { worker } => {
                state.budget.worker_jumps -= 1;
                state.workers[worker].lag -= JUMP;
            }
            Action::JumpClock { is_forward: true } => {
                state.budget.forward_jumps -= 1;
                state.now += JUMP;
                state.calls.iter_mut().for_each(|call| call.predates_fault = true);
                state
                    .workers
                    .iter_mut()
                    .for_each(|worker| worker.has_unchecked_clock = worker.incarnation > 0);
            }
            Action::JumpClock { is_forward: false } => {
                state.budget.backward_jumps -= 1;
                state.now -= JUMP;
            }
            Action::BreakConnection { call, is_lost } => {
                state.budget.broken_connections -= 1;
                let cut = state.calls[call];
                if cut.is_awaited {
                    self.fail(state, cut);
                }
                state.calls[call].is_awaited = false;
                if is_lost {
                    state.calls.remove(call);
                }
            }
            Action::RejectCommit { worker, run } => {
                state.budget.rejections -= 1;
                self.reject_commit(state, worker, run);
            }
            Action::LoseDirectory { session, root } => {
                state.budget.lost_directories -= 1;
                state.directories[session][root] = Default::default();
            }
            Action::StopUpkeep { process } => {
                state.budget.upkeep_crashes -= 1;
                state.stopped_processes |= bit(process);
                let sent = state.calls.iter_mut().filter(|call| call.by == Sender::Upkeep(process));
                sent.for_each(|call| call.is_awaited = false);
            }
            _ => {}
        }
    }

    fn apply_work(&self, state: &mut State, action: Action) {
        match action {
            Action::Register { worker } => state.register(worker),
            Action::Renew { worker } => {
                let sent = state.clock(worker);
                state.send_from(worker, Statement::Renew { sent });
            }
            Action::Fence { worker } => state.end_incarnation(worker),
            Action::Leave { worker } => state.leave(worker),
            Action::Acquire { worker, session } => {
                state.past.had_acquire = true;
                state.send_from(worker, Statement::Acquire { session });
            }
            Action::Release { worker, session, epoch } => {
                state.workers[worker].leases[session] = LocalLease::Releasing(epoch);
                state.send_from(worker, Statement::Release { session, epoch });
            }
            Action::BeginRemoval { worker, session } => self.begin_removal(state, worker, session),
            Action::RemoveDirectory { worker, session } => {
                self.remove_directory(state, worker, session)
            }
            Action::TakeAssigned { worker, run, epoch } => {
                self.take_assigned(state, worker, run, epoch)
            }
            Action::TakeQueued { worker, run, epoch } => {
                state.workers[worker].runs[run] = LocalRun::Beginning;
                state.send_from(worker, Statement::Begin { run, epoch });
            }
            Action::CheckLease { worker, run } => self.check_lease(state, worker, run),
            Action::Launch { worker, run } => self.launch(state, worker, run),
            Action::KeepAlive { worker, run } => self.keep_alive(state, worker, run),
            Action::NoticeCancel { worker, run } => {
                state.workers[worker].runs[run] = state.workers[worker].runs[run].canceled();
            }
            Action::Append { worker, run } => self.append(state, worker, run),
            Action::Exit { worker, run } => self.exit(state, worker, run),
            Action::SendCommit { worker, run } => {
                if let LocalRun::Done { epoch, result } = state.workers[worker].runs[run] {
                    state.send_from(worker, Statement::Commit { run, epoch, result });
                }
            }
            Action::SendAbandon { worker, run, epoch } => {
                state.send_from(worker, Statement::Abandon { run, epoch });
            }
            Action::SendHandBack { worker, run, turn } => {
                state.send_from(worker, Statement::HandBack { run, turn });
            }
            _ => {}
        }
    }
}

fn tick(state: &mut State) {
    state.time += 1;
    state.now += 1;
    for worker in state.workers.iter_mut().filter(|worker| worker.pause == Pause::Frozen) {
        worker.lag += 1;
    }
}

fn pause(state: &mut State, worker: usize, clock_stops: bool) {
    state.budget.pauses -= 1;
    let now = &mut state.workers[worker];
    now.pause = if clock_stops { Pause::Frozen } else { Pause::Stopped };
    now.has_unchecked_pause = true;
    now.has_unchecked_clock |= clock_stops;
    let sent = state.calls.iter_mut().filter(|call| call.worker() == Some(worker));
    sent.for_each(|call| call.predates_fault = true);
}

fn resume(state: &mut State, worker: usize) {
    let was_frozen = state.workers[worker].pause == Pause::Frozen;
    let is_expired = !state.believes_leased(worker);
    let now = &mut state.workers[worker];
    now.pause = Pause::No;
    now.has_unchecked_pause = was_frozen || is_expired;
}
