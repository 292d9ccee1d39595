//! Bounds of what the checker explores: which runs there are, and which events may happen how
//! often.

/// Bounds of the state space.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// The runs that callers want, at most two.
    pub runs: Vec<RunBounds>,
    /// The events that may happen on one path.
    pub budget: Budget,
    /// Maximum time.
    pub ticks: i8,
    /// How often the push of a run may arrive.
    pub pushes: u8,
    /// Whether both runs are the same request with one idempotency key, sent twice.
    pub same_key: bool,
    /// When the sessions expire, on the database's clock.
    pub expires_at: Option<i8>,
    /// Whether each worker has a root of its own. Otherwise they share one.
    pub separate_roots: bool,
    /// Whether the sessions may move to another root without their files.
    pub allow_data_loss: bool,
    /// Whether commands write output before they exit.
    pub output: bool,
    /// Whether two processes compete for the upkeep. Otherwise one does it and never stops.
    pub two_upkeep_processes: bool,
    /// Whether to check in each state that all runs end after the faults stop.
    pub check_recovery: bool,
}

/// One run that a caller wants.
#[derive(Debug, Clone, Copy)]
pub struct RunBounds {
    /// The session of the run: 0 or 1.
    pub session: usize,
    /// Allowed retries.
    pub retries: u8,
}

/// How often each event may happen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Budget {
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
    /// A worker's clock jumps forward.
    pub worker_jumps: u8,
    /// The database's clock jumps forward.
    pub forward_jumps: u8,
    /// The database's clock jumps backward.
    pub backward_jumps: u8,
    /// The database rejects every commit of a run, for example because of its content.
    pub rejections: u8,
    /// The directory of a session disappears while no worker holds the session.
    pub lost_directories: u8,
    /// A process that may do the upkeep stops for good.
    pub upkeep_crashes: u8,
    /// A worker is drained. Not a fault: no run may be lost by it.
    pub drains: u8,
    /// A caller cancels a run. Not a fault.
    pub cancels: u8,
    /// A caller closes a session. Not a fault.
    pub closes: u8,
    /// A push finds no free slot. Not a fault.
    pub full_pushes: u8,
    /// A call of a worker or caller is slow, and other steps may happen before its answer. Not a
    /// fault.
    pub slow_calls: u8,
    /// A task of the upkeep is slow. Not a fault.
    pub slow_tasks: u8,
}
