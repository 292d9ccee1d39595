//! The state of the model: clocks, database, files, workers and calls in flight.

use crate::{bounds::Budget, local::Worker, statement::Call};

/// Number of workers, sessions, runs and processes for upkeep.
pub(crate) const WORKERS: usize = 2;
pub(crate) const SESSIONS: usize = 2;
pub(crate) const RUNS: usize = 2;
pub(crate) const PROCESSES: usize = 2;
/// Lifetime of a lease in the database, in ticks.
pub(crate) const TTL: Time = 4;
/// How much earlier it ends for its worker: one tick for a lagging clock, one to kill sandboxes.
pub(crate) const MARGIN: Time = 2;
/// How long the owner of the upkeep has it after a pass.
pub(crate) const UPKEEP_TTL: Time = 1;
/// How long after the end of its workers' leases a root counts as gone.
pub(crate) const ROOT_GRACE: Time = 1;
/// How far a clock jumps: further than the margin.
pub(crate) const JUMP: Time = 3;

/// Ticks on a clock.
pub(crate) type Time = i8;
/// A set of rows: bit `n` stands for row `n`.
pub(crate) type Mask = u8;

/// One state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The time since the start, which no process knows.
    pub(crate) time: Time,
    /// The database's clock.
    pub(crate) now: Time,
    pub(crate) rows: [WorkerRow; WORKERS],
    pub(crate) sessions: [SessionRow; SESSIONS],
    pub(crate) runs: [RunRow; RUNS],
    /// The run that the shared idempotency key names.
    pub(crate) key: Option<usize>,
    pub(crate) upkeep: UpkeepRow,
    /// The directory of each session on each root.
    pub(crate) directories: [[Directory; WORKERS]; SESSIONS],
    pub(crate) workers: [Worker; WORKERS],
    /// Which processes for upkeep have stopped.
    pub(crate) stopped_processes: Mask,
    /// Statements that were sent and are not finished.
    pub(crate) calls: Vec<Call>,
    /// Pushes that an api may still send, possibly more than once.
    pub(crate) pushes: [Option<Push>; RUNS],
    /// Events that may still happen.
    pub(crate) budget: Budget,
    pub(crate) past: Past,
}

/// Events of the past that the properties need to know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Past {
    /// Runs that were recorded.
    pub(crate) recorded: Mask,
    /// Sessions in which a command was started.
    pub(crate) used: Mask,
    /// How often each run's command was started.
    pub(crate) starts: [u8; RUNS],
    /// How often each run got an outcome.
    pub(crate) outcomes: [u8; RUNS],
    /// A fault happened.
    pub(crate) had_fault: bool,
    /// A worker wanted to acquire a session.
    pub(crate) had_acquire: bool,
    /// A worker committed a run under a lease that it did not hold.
    pub(crate) stale_commit: bool,
    /// A worker was told that a stored result is refused.
    pub(crate) refused_stored_result: bool,
    /// A sweep took a run away from a live worker.
    pub(crate) took_live_run: bool,
    /// Expiry ended a session that had an unfinished run.
    pub(crate) expired_busy_session: bool,
    /// A command started without the files of an earlier one.
    pub(crate) missed_files: bool,
    /// A session ended as lost although a root has its files.
    pub(crate) ended_with_files: bool,
    /// A command ran in a directory that was removed.
    pub(crate) missed_directory: bool,
}

/// A row of `workers`. All leases of the worker expire with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct WorkerRow {
    /// The number of its incarnation.
    pub(crate) incarnation: u8,
    pub(crate) lease_until: Time,
    /// Whether it takes sessions: it is not draining.
    pub(crate) is_ready: bool,
    /// The worker left, or another process found the lease expired: it can never be renewed.
    pub(crate) is_gone: bool,
}

/// A row of `sessions`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct SessionRow {
    pub(crate) holder: Option<Incarnation>,
    pub(crate) epoch: u8,
    /// Whether it has a row in `waiting_sessions`: workers that look for work find it.
    pub(crate) is_waiting: bool,
    /// The root that has its files.
    pub(crate) home: Option<usize>,
    pub(crate) end: Option<EndReason>,
    /// Whether its directory is removed, or it had none.
    pub(crate) is_removed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum EndReason {
    Closed,
    Expired,
    DataLost,
}

/// A session's directory on one root.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) enum Directory {
    #[default]
    Missing,
    Empty,
    /// A directory with the files of all commands of the session.
    HasFiles,
}

/// The row that names the owner of the upkeep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct UpkeepRow {
    pub(crate) owner: usize,
    pub(crate) until: Time,
}

/// One incarnation of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Incarnation {
    pub(crate) worker: usize,
    pub(crate) number: u8,
}

/// The lease that a run is assigned under.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Assignment {
    pub(crate) incarnation: Incarnation,
    pub(crate) epoch: u8,
}

/// The rows of a run in all tables: its live row, its row in the history, its output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct RunRow {
    pub(crate) live: Option<LiveRun>,
    pub(crate) ended: Option<EndedRun>,
    /// The starts of its command that wrote the stored output.
    pub(crate) output: Mask,
}

/// A row of `live_runs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LiveRun {
    /// The lease under which it is running; `None` if it is queued.
    pub(crate) assignment: Option<Assignment>,
    pub(crate) attempt: u8,
    /// Incremented each time a worker begins it.
    pub(crate) turn: u8,
    /// The attempt in which its cancellation was requested.
    pub(crate) canceled_in: Option<u8>,
}

/// A row of `ended_runs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EndedRun {
    pub(crate) outcome: Outcome,
    /// The lease under which a worker committed it.
    pub(crate) by: Option<Assignment>,
    /// Which start of its command ended it; 0 if none was.
    pub(crate) start: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    Exited,
    Canceled,
    Refused,
    Lost,
}

/// A push in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Push {
    pub(crate) assignment: Assignment,
    /// How often it may still arrive.
    pub(crate) copies: u8,
}

impl State {
    /// The initial state: both workers are registered, and the first process has the upkeep.
    pub(crate) fn first(budget: Budget) -> Self {
        let row = WorkerRow { incarnation: 1, lease_until: TTL, is_ready: true, is_gone: false };
        Self {
            time: 0,
            now: 0,
            rows: [row; WORKERS],
            sessions: Default::default(),
            runs: Default::default(),
            key: None,
            upkeep: UpkeepRow { owner: 0, until: UPKEEP_TTL },
            directories: Default::default(),
            workers: [Worker::registered(), Worker::registered()],
            stopped_processes: 0,
            calls: Vec::new(),
            pushes: [None; RUNS],
            budget,
            past: Past::default(),
        }
    }

    /// The lease that a run is running under.
    pub(crate) fn assignment(&self, run: usize) -> Option<Assignment> {
        self.runs[run].live.and_then(|live| live.assignment)
    }

    /// Whether a run is queued.
    pub(crate) fn is_queued(&self, run: usize) -> bool {
        self.runs[run].live.is_some_and(|live| live.assignment.is_none())
    }
}

impl SessionRow {
    pub(crate) fn is_open(&self) -> bool {
        self.end.is_none()
    }

    pub(crate) fn is_held_under(&self, assignment: Assignment) -> bool {
        self.holder == Some(assignment.incarnation) && self.epoch == assignment.epoch
    }
}

impl RunRow {
    pub(crate) fn has_outcome(&self, outcome: Outcome) -> bool {
        self.ended.is_some_and(|ended| ended.outcome == outcome)
    }
}

/// The set of one row.
pub(crate) fn bit(row: usize) -> Mask {
    1 << row
}

/// The set of the rows below `count` for which the condition holds.
pub(crate) fn mask(count: usize, is: impl Fn(usize) -> bool) -> Mask {
    (0..count).filter(|row| is(*row)).fold(0, |rows, row| rows | bit(row))
}

/// The rows of a set.
pub(crate) fn rows(mask: Mask) -> impl Iterator<Item = usize> {
    (0..8).filter(move |row| mask & bit(*row) != 0)
}
