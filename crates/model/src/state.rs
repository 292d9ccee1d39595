//! The state of the model: clock, database, workers and calls in flight.

use crate::statement::Call;

/// Number of workers.
pub(crate) const WORKERS: usize = 2;
/// Lifetime of a lease in the database, in ticks.
pub(crate) const TTL: u8 = 4;
/// How much earlier it ends for its worker: one tick for a lagging clock, one to kill sandboxes.
pub(crate) const MARGIN: u8 = 2;

/// One state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The database's clock.
    pub(crate) now: u8,
    pub(crate) rows: [WorkerRow; WORKERS],
    pub(crate) session: SessionRow,
    pub(crate) runs: Vec<RunRow>,
    pub(crate) workers: [Worker; WORKERS],
    /// Statements that were sent and are not finished.
    pub(crate) calls: Vec<Call>,
    /// Pushes that an api may still send, possibly more than once.
    pub(crate) pushes: Vec<Option<Push>>,
    /// Faults that may still happen.
    pub(crate) budget: FaultBudget,
    pub(crate) history: History,
}

/// How often each fault may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FaultBudget {
    /// A worker crashes.
    pub crashes: u8,
    /// A worker is paused and resumed later. Its clock may stop or not.
    pub pauses: u8,
    /// A worker cannot reach the database for a while.
    pub partitions: u8,
    /// A connection breaks. The statement is lost, or continues without a receiver.
    pub broken_connections: u8,
    /// A worker's clock loses a tick.
    pub lost_ticks: u8,
    /// A worker is drained. Not a fault: no run may be lost by it.
    pub drains: u8,
    /// A push finds no free slot. Not a fault.
    pub full_pushes: u8,
    /// A call is slow, and other steps may happen before its answer. Not a fault.
    pub slow_calls: u8,
}

/// What the properties need to know of the past.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct History {
    /// How often each run's command was started.
    pub(crate) starts: Vec<u8>,
    /// How often each run got an outcome.
    pub(crate) outcomes: Vec<u8>,
    /// A worker committed a run under a lease that it did not hold.
    pub(crate) stale_commit: bool,
    /// A fault happened.
    pub(crate) had_fault: bool,
}

/// A row of `workers`. All leases of the worker expire with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WorkerRow {
    /// The number of its incarnation; 0 before the first.
    pub(crate) incarnation: u8,
    pub(crate) lease_until: u8,
    pub(crate) is_ready: bool,
    /// Another process found the lease expired: it can never be renewed.
    pub(crate) is_marked_expired: bool,
}

/// The lease columns of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SessionRow {
    pub(crate) holder: Option<Incarnation>,
    pub(crate) epoch: u8,
}

/// One incarnation of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Incarnation {
    pub(crate) worker: u8,
    pub(crate) number: u8,
}

/// The lease that a run is assigned under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Assignment {
    pub(crate) incarnation: Incarnation,
    pub(crate) epoch: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RunRow {
    pub(crate) state: RunState,
    pub(crate) attempt: u8,
    /// Incremented each time a worker begins it.
    pub(crate) turn: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RunState {
    Absent,
    Queued,
    Running(Assignment),
    Exited(Assignment),
    Lost,
}

impl RunState {
    pub(crate) fn is_ended(self) -> bool {
        matches!(self, Self::Exited(_) | Self::Lost)
    }
}

/// A push in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Push {
    pub(crate) assignment: Assignment,
    /// How often it may still arrive.
    pub(crate) copies: u8,
}

/// A worker process and its view of leases and runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Worker {
    pub(crate) is_up: bool,
    pub(crate) pause: Pause,
    /// It cannot reach the database.
    pub(crate) is_partitioned: bool,
    /// It was paused and has not checked yet whether its lease is still valid.
    pub(crate) has_unchecked_pause: bool,
    /// By how many ticks its clock is late.
    pub(crate) lag: u8,
    /// The number of its incarnation; 0 if it is not registered.
    pub(crate) incarnation: u8,
    /// When its lease ends, on its own clock.
    pub(crate) valid_until: u8,
    pub(crate) is_draining: bool,
    pub(crate) lease: LocalLease,
    pub(crate) runs: Vec<LocalRun>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Pause {
    No,
    /// Its clock continues.
    Stopped,
    /// Its clock stops too.
    Frozen,
}

/// A worker's view of its lease on the session, with the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LocalLease {
    None,
    Held(u8),
    /// It is being released: no run may start.
    Releasing(u8),
}

/// A worker's view of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum LocalRun {
    Unknown,
    /// It sent a statement to begin it.
    Beginning,
    /// It is assigned to execute it.
    Assigned {
        epoch: u8,
        turn: u8,
    },
    /// It has checked its lease and may start the command.
    Checked {
        epoch: u8,
    },
    /// The command runs.
    Running {
        epoch: u8,
    },
    /// The command has exited; the result is not committed yet.
    Done {
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

impl LocalRun {
    /// Whether the run keeps the session busy.
    pub(crate) fn is_active(self) -> bool {
        !matches!(self, Self::Unknown | Self::Uncertain | Self::HandedBack | Self::Ended)
    }
}

impl State {
    /// The initial state: both workers are registered.
    pub(crate) fn first(runs: usize, budget: FaultBudget) -> Self {
        let worker = Worker {
            is_up: true,
            pause: Pause::No,
            is_partitioned: false,
            has_unchecked_pause: false,
            lag: 0,
            incarnation: 1,
            valid_until: TTL - MARGIN,
            is_draining: false,
            lease: LocalLease::None,
            runs: vec![LocalRun::Unknown; runs],
        };
        Self {
            now: 0,
            rows: [WorkerRow { incarnation: 1, lease_until: TTL, is_ready: true, is_marked_expired: false };
                WORKERS],
            session: SessionRow { holder: None, epoch: 0 },
            runs: vec![RunRow { state: RunState::Absent, attempt: 1, turn: 0 }; runs],
            workers: [worker.clone(), worker],
            calls: Vec::new(),
            pushes: vec![None; runs],
            budget,
            history: History {
                starts: vec![0; runs],
                outcomes: vec![0; runs],
                stale_commit: false,
                had_fault: false,
            },
        }
    }

    /// Whether all runs have an outcome.
    pub(crate) fn all_ended(&self) -> bool {
        self.runs.iter().all(|run| run.state.is_ended())
    }
}
