//! The steps of a worker with a run, as in `crates/worker/src/run`.

use crate::{
    local::{Command, LocalLease, LocalRun, RunResult},
    protocol::{Protocol, Variant},
    state::{Assignment, Directory, State, bit},
    statement::{Call, Statement},
};

/// A run that is assigned to a worker, as the worker learns of it.
#[derive(Debug, Clone, Copy)]
struct Found {
    epoch: u8,
    turn: u8,
    is_canceled: bool,
    /// No slot is free.
    is_full: bool,
}

impl Protocol {
    /// Checks the lease before starting a run.
    pub(crate) fn check_lease(&self, state: &mut State, worker: usize, run: usize) {
        let LocalRun::Assigned { epoch, turn } = state.workers[worker].runs[run] else { return };
        let is_leased = state.believes_leased(worker) || self.is(Variant::NoSelfFencing);
        let lease = state.workers[worker].leases[self.session_of(run)];
        state.workers[worker].runs[run] = match lease {
            _ if !is_leased && self.is(Variant::RevivedLease) => LocalRun::Ended,
            // Whatever notices the expired lease first ends the whole incarnation.
            _ if !is_leased => return state.end_incarnation(worker),
            LocalLease::Held(held) if held == epoch => LocalRun::Checked { epoch },
            LocalLease::Closing(held) if held == epoch && self.is(Variant::StartWhileClosing) => {
                LocalRun::Checked { epoch }
            }
            LocalLease::Closing(held) if held == epoch => LocalRun::canceled_unstarted(epoch),
            _ => LocalRun::HandingBack { turn },
        };
    }

    /// The poll finds a run that is assigned to this incarnation.
    pub(crate) fn take_assigned(&self, state: &mut State, worker: usize, run: usize, epoch: u8) {
        let Some(live) = state.runs[run].live else { return };
        let is_canceled = live.canceled_in.is_some();
        let found = Found { epoch, turn: live.turn, is_canceled, is_full: false };
        state.workers[worker].runs[run] = self.assigned(state, worker, run, found);
    }

    /// A push arrives. It is a hint: the worker ignores runs that it already knows.
    pub(crate) fn take_push(&self, state: &mut State, run: usize, is_full: bool) {
        let Some(push) = &mut state.pushes[run] else { return };
        push.copies -= 1;
        let Assignment { incarnation, epoch } = push.assignment;
        if push.copies == 0 {
            state.pushes[run] = None;
        }
        let worker = incarnation.worker;
        let now = &state.workers[worker];
        let is_forgotten = self.is(Variant::NoPushMemory) && !now.runs[run].is_active();
        let is_known = now.runs[run] != LocalRun::Unknown && !is_forgotten;
        let is_ours = now.incarnation == incarnation.number
            && now.leases[self.session_of(run)].epoch() == Some(epoch);
        if !is_known && is_ours && state.believes_leased(worker) {
            // A push is about the assignment that the insert made.
            let found = Found { epoch, turn: 0, is_canceled: false, is_full };
            state.workers[worker].runs[run] = self.assigned(state, worker, run, found);
        }
    }

    /// The first step of a worker with a run that is assigned to it.
    fn assigned(&self, state: &State, worker: usize, run: usize, found: Found) -> LocalRun {
        let Found { epoch, turn, is_canceled, is_full } = found;
        let now = &state.workers[worker];
        match now.leases[self.session_of(run)] {
            lease if lease.epoch() != Some(epoch) => LocalRun::HandingBack { turn },
            // The run ends before its command starts, so it needs no slot.
            LocalLease::Closing(_) => LocalRun::canceled_unstarted(epoch),
            _ if is_canceled => LocalRun::canceled_unstarted(epoch),
            _ if is_full || now.is_draining => LocalRun::HandingBack { turn },
            _ => LocalRun::Assigned { epoch, turn },
        }
    }

    pub(crate) fn launch(&self, state: &mut State, worker: usize, run: usize) {
        let LocalRun::Checked { epoch } = state.workers[worker].runs[run] else { return };
        let session = self.session_of(run);
        let directory = &mut state.directories[session][self.root(worker)];
        let was_used = state.past.used & bit(session) != 0;
        // See `is_exempt`: no lease covers this start.
        let is_exempt =
            state.workers[worker].has_unchecked_clock || state.workers[worker].has_unchecked_pause;
        state.past.missed_directory |= *directory == Directory::Missing && !is_exempt;
        state.past.missed_files |=
            *directory == Directory::Empty && was_used && !self.bounds.allow_data_loss;
        *directory = Directory::HasFiles;
        state.past.used |= bit(session);
        state.past.starts[run] += 1;
        state.workers[worker].runs[run] = LocalRun::Running(Command {
            epoch,
            start: state.past.starts[run],
            // Only a pause can come before the worker has told the sandbox.
            is_kept_alive: self.bounds.budget.pauses == 0,
            has_appended: !self.bounds.output,
        });
    }

    /// Tells a sandbox when the lease ends. If that time has passed, the sandbox ends.
    pub(crate) fn keep_alive(&self, state: &mut State, worker: usize, run: usize) {
        let is_leased = state.believes_leased(worker) || self.is(Variant::NoSelfFencing);
        match &mut state.workers[worker].runs[run] {
            LocalRun::Running(command) if is_leased => command.is_kept_alive = true,
            run => *run = LocalRun::Killed,
        }
    }

    /// A part of the output is due to be stored while the command runs.
    pub(crate) fn append(&self, state: &mut State, worker: usize, run: usize) {
        if let LocalRun::Running(command) = &mut state.workers[worker].runs[run] {
            command.has_appended = true;
            let epoch = command.epoch;
            let start = command.start;
            state.send_from(worker, Statement::Append { run, epoch, start });
        }
    }

    pub(crate) fn exit(&self, state: &mut State, worker: usize, run: usize) {
        if let LocalRun::Running(Command { epoch, start, .. }) = state.workers[worker].runs[run] {
            let result = RunResult { is_canceled: false, start };
            state.workers[worker].runs[run] = LocalRun::Done { epoch, result };
        }
    }

    pub(crate) fn reject_commit(&self, state: &mut State, worker: usize, run: usize) {
        if let LocalRun::Done { epoch, .. } = state.workers[worker].runs[run] {
            state.workers[worker].runs[run] = if self.is(Variant::NoAbandon) {
                LocalRun::Ended
            } else {
                LocalRun::Abandoning { epoch }
            };
        }
    }

    /// Notes a result that the worker drops although it is stored.
    pub(super) fn record_refused_result(
        &self,
        state: &mut State,
        run: usize,
        call: &Call,
        epoch: u8,
    ) {
        let under = call.incarnation().map(|incarnation| Assignment { incarnation, epoch });
        let is_stored =
            state.runs[run].ended.is_some_and(|ended| ended.by.is_some() && ended.by == under);
        state.past.refused_stored_result |= is_stored;
    }
}
