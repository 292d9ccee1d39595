//! The workers, as in `crates/worker`.

use crate::{
    protocol::{Protocol, Variant},
    state::{Incarnation, LocalLease, LocalRun, MARGIN, Pause, State, TTL, Worker},
    statement::{Answer, Call, Stage, Statement},
};

impl State {
    /// The time on a worker's own clock.
    pub(crate) fn clock(&self, worker: usize) -> u8 {
        self.now.saturating_sub(self.workers[worker].lag)
    }

    /// Whether a worker that checks its clock considers its lease valid.
    pub(crate) fn believes_leased(&self, worker: usize) -> bool {
        self.workers[worker].incarnation > 0 && self.clock(worker) < self.workers[worker].valid_until
    }

    pub(crate) fn incarnation(&self, worker: usize) -> Incarnation {
        Incarnation { worker: index(worker), number: self.workers[worker].incarnation }
    }

    /// Whether a worker waits for the answer to a matching statement.
    pub(crate) fn awaits(&self, worker: usize, is: impl Fn(Statement) -> bool) -> bool {
        self.calls
            .iter()
            .any(|call| call.is_awaited && usize::from(call.by.worker) == worker && is(call.statement))
    }

    pub(crate) fn send(&mut self, by: Incarnation, statement: Statement) {
        let stage = Stage::Sent;
        self.calls.push(Call {
            statement,
            by,
            stage,
            is_awaited: true,
            is_slow: false,
            predates_pause: false,
        });
    }

    /// Ends an incarnation: kills its commands and drops the answers it waits for.
    pub(crate) fn end_incarnation(&mut self, worker: usize) {
        let number = index(worker);
        let now = &mut self.workers[worker];
        now.incarnation = 0;
        now.valid_until = 0;
        now.has_unchecked_pause = false;
        now.lease = LocalLease::None;
        now.runs.fill(LocalRun::Unknown);
        let mine = |call: &Call| call.by.worker == number && !call.is_insert();
        self.calls.retain(|call| !(mine(call) && matches!(call.stage, Stage::Answered(_))));
        self.calls.iter_mut().filter(|call| mine(call)).for_each(|call| call.is_awaited = false);
    }

    pub(crate) fn register(&mut self, worker: usize) {
        let row = &mut self.rows[worker];
        row.incarnation += 1;
        row.lease_until = self.now + TTL;
        row.is_ready = true;
        row.is_marked_expired = false;
        let incarnation = row.incarnation;
        let valid_until = self.clock(worker) + TTL - MARGIN;
        let now = &mut self.workers[worker];
        now.incarnation = incarnation;
        now.valid_until = valid_until;
    }
}

impl Worker {
    pub(crate) fn is_running(&self) -> bool {
        self.is_up && self.pause == Pause::No
    }
}

impl Protocol {
    /// Handles the answer to a call.
    pub(crate) fn receive(&self, state: &mut State, call: Call, answer: Answer) {
        let worker = usize::from(call.by.worker);
        let set = |state: &mut State, run: usize, local| state.workers[worker].runs[run] = local;
        match (call.statement, answer) {
            (Statement::Insert { .. }, _) => {}
            (Statement::Renew { sent }, Answer::Done(_))
                if state.believes_leased(worker)
                    || self.is(Variant::RevivedLease)
                    || self.is(Variant::NoSelfFencing) =>
            {
                state.workers[worker].valid_until = sent + TTL - MARGIN;
                // The answer to a call from before a pause says nothing about the time after it.
                state.workers[worker].has_unchecked_pause &= call.predates_pause;
            }
            (Statement::Renew { .. }, _) => state.end_incarnation(worker),
            (Statement::Acquire, Answer::Done(epoch)) => {
                state.workers[worker].lease = LocalLease::Held(epoch)
            }
            (Statement::Acquire, _) => {}
            (Statement::Release { .. }, Answer::Busy) => {}
            (Statement::Release { .. }, _) => state.workers[worker].lease = LocalLease::None,
            (Statement::Begin { run, epoch }, Answer::Done(turn)) => {
                set(state, run, LocalRun::Assigned { epoch, turn });
            }
            (Statement::Begin { run, .. }, _) => set(state, run, LocalRun::Uncertain),
            (Statement::HandBack { run, .. }, _) => set(state, run, LocalRun::HandedBack),
            (Statement::Commit { run, .. }, _) => set(state, run, LocalRun::Ended),
        }
    }

    /// Handles a broken connection. The statement may or may not be executed.
    pub(crate) fn fail(&self, state: &mut State, call: Call) {
        if let Statement::Begin { run, .. } = call.statement {
            state.workers[usize::from(call.by.worker)].runs[run] = LocalRun::Uncertain;
        }
    }

    /// Checks the lease before starting a run.
    pub(crate) fn check_lease(&self, state: &mut State, worker: usize, run: usize) {
        let LocalRun::Assigned { epoch, turn } = state.workers[worker].runs[run] else { return };
        let holds = state.workers[worker].lease == LocalLease::Held(epoch);
        let is_leased = state.believes_leased(worker) || self.is(Variant::NoSelfFencing);
        state.workers[worker].runs[run] = match (is_leased, holds) {
            (true, true) => LocalRun::Checked { epoch },
            (true, false) => LocalRun::HandingBack { turn },
            (false, _) if self.is(Variant::RevivedLease) => LocalRun::Ended,
            // Whatever notices the expired lease first ends the whole incarnation.
            (false, _) => return state.end_incarnation(worker),
        };
    }

    /// The poll finds a run that is assigned to this incarnation.
    pub(crate) fn take_assigned(&self, state: &mut State, worker: usize, run: usize, epoch: u8) {
        let turn = state.runs[run].turn;
        let now = &state.workers[worker];
        let can_start = now.lease == LocalLease::Held(epoch) && !now.is_draining;
        state.workers[worker].runs[run] =
            if can_start { LocalRun::Assigned { epoch, turn } } else { LocalRun::HandingBack { turn } };
    }

    /// A push arrives. It is a hint: the worker ignores runs that it already knows.
    pub(crate) fn take_push(&self, state: &mut State, run: usize, is_full: bool) {
        let Some(push) = &mut state.pushes[run] else { return };
        push.copies -= 1;
        let assignment = push.assignment;
        if push.copies == 0 {
            state.pushes[run] = None;
        }
        let worker = usize::from(assignment.incarnation.worker);
        let now = &state.workers[worker];
        let is_forgotten = self.is(Variant::NoPushMemory) && !now.runs[run].is_active();
        let is_known = now.runs[run] != LocalRun::Unknown && !is_forgotten;
        let is_ours = now.incarnation == assignment.incarnation.number
            && now.lease == LocalLease::Held(assignment.epoch);
        if is_known || !is_ours || !state.believes_leased(worker) {
            return;
        }
        let must_hand_back = is_full || now.is_draining;
        // A push is about the assignment that the insert made.
        let (epoch, turn) = (assignment.epoch, 0);
        state.workers[worker].runs[run] =
            if must_hand_back { LocalRun::HandingBack { turn } } else { LocalRun::Assigned { epoch, turn } };
    }

    pub(crate) fn leave(&self, state: &mut State, worker: usize) {
        state.rows[worker].lease_until = state.now;
        state.rows[worker].is_marked_expired = true;
        state.end_incarnation(worker);
        state.workers[worker].is_up = false;
    }
}

pub(crate) fn index(worker: usize) -> u8 {
    u8::try_from(worker).unwrap_or(u8::MAX)
}
