//! Everything there is at one moment: the clock, the database, the workers, what is in flight.

use crate::statement::Flight;

/// How many workers there are.
pub(crate) const WORKERS: usize = 2;
/// How long a lease lives in the database, in ticks of its clock.
pub(crate) const TTL: u8 = 4;
/// How long before that it ends for its worker: one tick for a clock that lags, one to kill.
pub(crate) const MARGIN: u8 = 2;

/// One moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The database's clock.
    pub(crate) now: u8,
    pub(crate) rows: [WorkerRow; WORKERS],
    pub(crate) session: SessionRow,
    pub(crate) runs: Vec<RunRow>,
    pub(crate) workers: [Worker; WORKERS],
    /// Statements that were sent and are not over.
    pub(crate) flights: Vec<Flight>,
    /// What an api may still push, again and again.
    pub(crate) pushes: Vec<Option<Push>>,
    /// Faults that may still happen.
    pub(crate) left: Budget,
    pub(crate) seen: Seen,
}

/// Faults that may happen, each so many times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    /// A worker dies.
    pub crashes: u8,
    /// A worker is stopped and goes on later, its clock with it or not.
    pub pauses: u8,
    /// A worker is cut off from the database for a while.
    pub partitions: u8,
    /// A connection breaks: the statement is lost, or goes on without anybody who hears of it.
    pub cuts: u8,
    /// A worker's clock loses a tick.
    pub lags: u8,
    /// A worker is drained. No fault: nothing may be lost by it.
    pub drains: u8,
    /// A push finds no free slot. No fault either.
    pub full: u8,
    /// A statement takes its time, and anything may happen meanwhile. No fault either.
    pub slow: u8,
}

/// What the checker remembers of the past.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Seen {
    /// How often each run's command was started.
    pub(crate) starts: Vec<u8>,
    /// How often each run was given an outcome.
    pub(crate) endings: Vec<u8>,
    /// A worker ended a run under a lease it did not have.
    pub(crate) stale_commit: bool,
    /// Something went wrong that nobody asked for.
    pub(crate) faulty: bool,
}

/// A worker's row: all its leases live as long as it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WorkerRow {
    /// Its incarnation; 0 before the first.
    pub(crate) life: u8,
    pub(crate) lease_until: u8,
    pub(crate) is_ready: bool,
    /// Somebody found its lease run out: it is never renewed again.
    pub(crate) is_gone: bool,
}

/// The session's lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SessionRow {
    pub(crate) holder: Option<Life>,
    pub(crate) epoch: u8,
}

/// One incarnation of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Life {
    pub(crate) worker: u8,
    pub(crate) number: u8,
}

/// Whom a run is recorded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Claim {
    pub(crate) life: Life,
    pub(crate) epoch: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RunRow {
    pub(crate) state: RunState,
    pub(crate) attempt: u8,
    /// Raised each time somebody begins it.
    pub(crate) turn: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RunState {
    Absent,
    Queued,
    Running(Claim),
    Exited(Claim),
    Lost,
}

impl RunState {
    pub(crate) fn is_ended(self) -> bool {
        matches!(self, Self::Exited(_) | Self::Lost)
    }
}

/// A push that is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Push {
    pub(crate) claim: Claim,
    /// How often it may still arrive.
    pub(crate) copies: u8,
}

/// A worker process, and what it believes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Worker {
    pub(crate) is_up: bool,
    pub(crate) pause: Pause,
    /// The database cannot be reached.
    pub(crate) is_cut_off: bool,
    /// It was paused and has not yet looked whether its lease outlived that.
    pub(crate) is_dazed: bool,
    /// How far its clock is behind.
    pub(crate) lag: u8,
    /// 0: not registered.
    pub(crate) life: u8,
    /// On its own clock.
    pub(crate) valid_until: u8,
    pub(crate) is_draining: bool,
    pub(crate) holding: Holding,
    pub(crate) runs: Vec<Local>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Pause {
    No,
    /// Its clock goes on.
    Stopped,
    /// Its clock stands still too.
    Frozen,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holding {
    Not,
    Held(u8),
    /// It is being given back: nothing of it is started any more.
    Releasing(u8),
}

/// What a worker knows of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Local {
    Unknown,
    /// It asked to begin it.
    Beginning,
    /// It is to execute it.
    Claimed {
        epoch: u8,
        turn: u8,
    },
    /// It has made sure that it may start it.
    Cleared {
        epoch: u8,
    },
    /// Its command runs.
    Living {
        epoch: u8,
    },
    /// Its command has ended; the result is to be stored.
    Done {
        epoch: u8,
    },
    HandingBack {
        turn: u8,
    },
    /// It was to begin it; whether the database knows is unknown.
    Left,
    HandedBack,
    Ended,
}

impl Local {
    /// Whether it keeps the session in use.
    pub(crate) fn is_active(self) -> bool {
        !matches!(self, Self::Unknown | Self::Left | Self::HandedBack | Self::Ended)
    }
}

impl State {
    /// Before anything happened: both workers have registered.
    pub(crate) fn first(runs: usize, left: Budget) -> Self {
        let worker = Worker {
            is_up: true,
            pause: Pause::No,
            is_cut_off: false,
            is_dazed: false,
            lag: 0,
            life: 1,
            valid_until: TTL - MARGIN,
            is_draining: false,
            holding: Holding::Not,
            runs: vec![Local::Unknown; runs],
        };
        Self {
            now: 0,
            rows: [WorkerRow { life: 1, lease_until: TTL, is_ready: true, is_gone: false }; WORKERS],
            session: SessionRow { holder: None, epoch: 0 },
            runs: vec![RunRow { state: RunState::Absent, attempt: 1, turn: 0 }; runs],
            workers: [worker.clone(), worker],
            flights: Vec::new(),
            pushes: vec![None; runs],
            left,
            seen: Seen { starts: vec![0; runs], endings: vec![0; runs], stale_commit: false, faulty: false },
        }
    }

    /// Whether all runs have their outcome.
    pub(crate) fn all_ended(&self) -> bool {
        self.runs.iter().all(|run| run.state.is_ended())
    }
}
