//! The workers, as in `crates/worker`: what they do with answers, and how an incarnation ends.

mod run;
mod upkeep;

use crate::{
    local::{Command, LocalLease, LocalRun},
    protocol::{Protocol, Variant},
    state::{Directory, MARGIN, State, TTL, Time},
    statement::{Answer, Call, Sender, Stage, Statement},
};

impl State {
    /// Whether a worker waits for the answer to a matching statement.
    pub(crate) fn awaits(&self, worker: usize, is: impl Fn(Statement) -> bool) -> bool {
        self.calls
            .iter()
            .any(|call| call.is_awaited && call.worker() == Some(worker) && is(call.statement))
    }

    pub(crate) fn send_from(&mut self, worker: usize, statement: Statement) {
        self.send(Sender::Worker(self.incarnation(worker)), statement);
    }

    /// Ends an incarnation: kills its commands and drops the answers it waits for.
    pub(crate) fn end_incarnation(&mut self, worker: usize) {
        let now = &mut self.workers[worker];
        now.incarnation = 0;
        now.valid_until = 0;
        now.has_unchecked_pause = false;
        now.has_unchecked_clock = false;
        now.leases = Default::default();
        now.removing = 0;
        now.runs = Default::default();
        let is_mine = |call: &Call| call.worker() == Some(worker);
        self.calls.retain(|call| !(is_mine(call) && matches!(call.stage, Stage::Answered(_))));
        self.calls.iter_mut().filter(|call| is_mine(call)).for_each(|call| call.is_awaited = false);
    }

    /// Sends a registration of a new incarnation, which replaces the one that the worker finds.
    pub(crate) fn register(&mut self, worker: usize) {
        self.workers[worker].registrations += 1;
        let number = self.workers[worker].registrations;
        let replaces = self.rows[worker].incarnation;
        let sent = self.clock(worker);
        self.send_from(worker, Statement::Register { number, replaces, sent });
    }

    /// Sends the end of the worker's registration. The process does not wait for it.
    pub(crate) fn leave(&mut self, worker: usize) {
        self.send_from(worker, Statement::Leave);
        self.end_incarnation(worker);
        self.workers[worker].is_up = false;
    }
}

impl Protocol {
    /// Handles the answer to a call of a worker.
    pub(crate) fn receive(&self, state: &mut State, call: Call, answer: Answer) {
        let Some(worker) = call.worker() else { return };
        let set = |state: &mut State, run: usize, local| state.workers[worker].runs[run] = local;
        match (call.statement, answer) {
            (Statement::Register { number, sent, .. }, Answer::Done) => {
                state.workers[worker].incarnation = number;
                state.workers[worker].valid_until = self.valid_until(state, worker, sent);
            }
            (Statement::Renew { sent }, answer) => {
                self.receive_renewal(state, worker, sent, &call, answer)
            }
            (Statement::Acquire { session }, Answer::Acquired { epoch, has_files }) => {
                self.open_session(state, worker, session, epoch, has_files);
            }
            (Statement::Release { .. }, Answer::Busy) => {}
            (Statement::Release { session, .. } | Statement::MarkRemoved { session }, _) => {
                state.workers[worker].leases[session] = LocalLease::None;
            }
            (Statement::Begin { run, epoch }, Answer::Begun { is_canceled: true, .. }) => {
                set(state, run, LocalRun::canceled_unstarted(epoch));
            }
            (Statement::Begin { run, epoch }, Answer::Begun { turn, .. }) => {
                set(state, run, LocalRun::Assigned { epoch, turn });
            }
            (Statement::Begin { run, .. }, _) => set(state, run, LocalRun::Uncertain),
            (Statement::HandBack { run, .. }, _) => set(state, run, LocalRun::HandedBack),
            (Statement::Commit { run, epoch, .. }, Answer::Refused) => {
                self.record_refused_result(state, run, &call, epoch);
                set(state, run, LocalRun::Abandoning { epoch });
            }
            (Statement::Commit { run, .. } | Statement::Abandon { run, .. }, _) => {
                set(state, run, LocalRun::Ended)
            }
            _ => {}
        }
    }

    fn receive_renewal(
        &self,
        state: &mut State,
        worker: usize,
        sent: Time,
        call: &Call,
        answer: Answer,
    ) {
        let is_late = !state.believes_leased(worker)
            && !self.is(Variant::RevivedLease)
            && !self.is(Variant::NoSelfFencing);
        if answer != Answer::Done || is_late {
            return state.end_incarnation(worker);
        }
        let valid_until = self.valid_until(state, worker, sent);
        let now = &mut state.workers[worker];
        now.valid_until = valid_until;
        // The answer to a call from before the fault says nothing about the time after it.
        now.has_unchecked_pause &= call.predates_fault;
        now.has_unchecked_clock &= call.predates_fault;
        for run in &mut now.runs {
            if let LocalRun::Running(Command { is_kept_alive, .. }) = run {
                *is_kept_alive = true;
            }
        }
    }

    /// When a lease ends for its worker, on its own clock.
    fn valid_until(&self, state: &State, worker: usize, sent: Time) -> Time {
        let since = if self.is(Variant::LeaseFromAnswer) { state.clock(worker) } else { sent };
        since + TTL - if self.is(Variant::NoMargin) { 0 } else { MARGIN }
    }

    /// Opens the directory of a session that was just acquired. If the files of a used session are
    /// lost, the session ends.
    fn open_session(
        &self,
        state: &mut State,
        worker: usize,
        session: usize,
        epoch: u8,
        has_files: bool,
    ) {
        let directory = &mut state.directories[session][self.root(worker)];
        if *directory == Directory::Missing {
            if has_files && !self.is(Variant::NoFilesCheck) {
                return state.send_from(worker, Statement::EndDataLost { session, epoch });
            }
            *directory = Directory::Empty;
        }
        state.workers[worker].leases[session] = LocalLease::Held(epoch);
    }

    /// Handles a broken connection. The statement may or may not be executed.
    pub(crate) fn fail(&self, state: &mut State, call: Call) {
        if let (Statement::Begin { run, .. }, Some(worker)) = (call.statement, call.worker()) {
            state.workers[worker].runs[run] = LocalRun::Uncertain;
        }
    }
}
