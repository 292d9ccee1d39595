//! A worker process and its view of leases and runs.

use crate::state::{Incarnation, MARGIN, Mask, RUNS, SESSIONS, State, TTL, Time};

/// A worker process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Worker {
    pub(crate) is_up: bool,
    pub(crate) pause: Pause,
    /// Whether it cannot reach the database.
    pub(crate) is_partitioned: bool,
    /// Whether it was paused and has not checked yet whether its lease is still valid.
    pub(crate) has_unchecked_pause: bool,
    /// Whether its clock stopped, or the database's clock jumped, and it has not checked its lease
    /// since.
    pub(crate) has_unchecked_clock: bool,
    /// By how many ticks its clock is late.
    pub(crate) lag: Time,
    /// The incarnations that it wanted to register.
    pub(crate) registrations: u8,
    /// The number of its incarnation; 0 if it is not registered.
    pub(crate) incarnation: u8,
    /// When its lease ends, on its own clock.
    pub(crate) valid_until: Time,
    pub(crate) is_draining: bool,
    pub(crate) leases: [LocalLease; SESSIONS],
    /// Ended sessions whose directories it removes.
    pub(crate) removing: Mask,
    pub(crate) runs: [LocalRun; RUNS],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Pause {
    No,
    /// Stopped while its clock continues.
    Stopped,
    /// Stopped with its clock, and so are its sandboxes.
    Frozen,
}

/// A worker's view of its lease on a session, with the epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) enum LocalLease {
    #[default]
    None,
    Held(u8),
    /// Held, but the session has ended: its runs are canceled.
    Closing(u8),
    /// The worker releases it: no run may start.
    Releasing(u8),
}

/// A worker's view of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) enum LocalRun {
    #[default]
    Unknown,
    /// The worker sent a statement to begin it.
    Beginning,
    /// The worker is assigned to execute it.
    Assigned {
        epoch: u8,
        turn: u8,
    },
    /// The worker has checked its lease and may start the command.
    Checked {
        epoch: u8,
    },
    /// The command runs.
    Running(Command),
    /// `codelia-init` killed the command, because the worker did not extend its time.
    Killed,
    /// The sandbox is gone; the result is not committed yet.
    Done {
        epoch: u8,
        result: RunResult,
    },
    /// The result cannot be stored; the run is to be ended as lost.
    Abandoning {
        epoch: u8,
    },
    HandingBack {
        turn: u8,
    },
    /// Beginning it failed; the database may have assigned it anyway.
    Uncertain,
    HandedBack,
    Ended,
}

/// A command that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Command {
    pub(crate) epoch: u8,
    /// Which start of the run's command it is, from 1.
    pub(crate) start: u8,
    /// Whether its sandbox knows when the worker's lease ends.
    pub(crate) is_kept_alive: bool,
    /// Whether a part of its output was appended.
    pub(crate) has_appended: bool,
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RunResult {
    pub(crate) is_canceled: bool,
    /// Which start of the run's command it is of; 0 if the command was not started.
    pub(crate) start: u8,
}

impl Worker {
    /// A worker that has just registered its first incarnation.
    pub(crate) fn registered() -> Self {
        Self {
            is_up: true,
            pause: Pause::No,
            is_partitioned: false,
            has_unchecked_pause: false,
            has_unchecked_clock: false,
            lag: 0,
            registrations: 1,
            incarnation: 1,
            valid_until: TTL - MARGIN,
            is_draining: false,
            leases: Default::default(),
            removing: 0,
            runs: Default::default(),
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.is_up && self.pause == Pause::No
    }

    /// Whether it is registered and can act.
    pub(crate) fn is_acting(&self) -> bool {
        self.is_running() && self.incarnation > 0
    }
}

impl LocalLease {
    /// The epoch, if runs of the session may be started or canceled under it.
    pub(crate) fn epoch(self) -> Option<u8> {
        if let Self::Held(epoch) | Self::Closing(epoch) = self { Some(epoch) } else { None }
    }
}

impl LocalRun {
    /// A run that is canceled before its command starts.
    pub(crate) fn canceled_unstarted(epoch: u8) -> Self {
        Self::Done { epoch, result: RunResult { is_canceled: true, start: 0 } }
    }

    /// Whether the run keeps the session busy.
    pub(crate) fn is_active(self) -> bool {
        !matches!(self, Self::Unknown | Self::Uncertain | Self::HandedBack | Self::Ended)
    }

    /// Whether the worker executes it: it waits for nothing but its sandbox and its commit.
    pub(crate) fn is_executed(self) -> bool {
        self.is_active() && !matches!(self, Self::Beginning | Self::HandingBack { .. })
    }

    /// The run after its cancellation was noticed.
    pub(crate) fn canceled(self) -> Self {
        match self {
            Self::Assigned { epoch, .. } | Self::Checked { epoch } => {
                Self::canceled_unstarted(epoch)
            }
            Self::Running(Command { epoch, start, .. }) => {
                Self::Done { epoch, result: RunResult { is_canceled: true, start } }
            }
            other => other,
        }
    }
}

impl State {
    /// The time on a worker's own clock.
    pub(crate) fn clock(&self, worker: usize) -> Time {
        self.time - self.workers[worker].lag
    }

    /// Whether a worker that checks its clock considers its lease valid.
    pub(crate) fn believes_leased(&self, worker: usize) -> bool {
        self.workers[worker].incarnation > 0
            && self.clock(worker) < self.workers[worker].valid_until
    }

    pub(crate) fn incarnation(&self, worker: usize) -> Incarnation {
        Incarnation { worker, number: self.workers[worker].incarnation }
    }
}
