//! The steps that the checker can take.

use crate::statement::Statement;

/// One action of a caller, the environment, a worker or the database. Workers, sessions, runs and
/// processes are indices; `call` is an index into the calls in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are enough")]
pub enum Action {
    Tick,

    // Faults.
    Crash {
        worker: usize,
    },
    Pause {
        worker: usize,
        clock_stops: bool,
    },
    Partition {
        worker: usize,
    },
    /// Time passes, but not on this worker's clock.
    LoseTick {
        worker: usize,
    },
    /// This worker's clock jumps forward.
    JumpWorkerClock {
        worker: usize,
    },
    /// The database's clock jumps.
    JumpClock {
        is_forward: bool,
    },
    /// The connection breaks. The statement is lost, or continues without a receiver.
    BreakConnection {
        call: usize,
        is_lost: bool,
    },
    /// The database rejects the commit of a run, however often it is repeated.
    RejectCommit {
        worker: usize,
        run: usize,
    },
    /// The directory of a session that no worker holds disappears.
    LoseDirectory {
        session: usize,
        root: usize,
    },
    /// A process that may do upkeep stops for good.
    StopUpkeep {
        process: usize,
    },

    // The end of a fault.
    Reconnect {
        worker: usize,
    },
    Resume {
        worker: usize,
    },
    Restart {
        worker: usize,
    },
    /// `codelia-init` kills the command of a worker that does not extend its time.
    KillUnattended {
        worker: usize,
        run: usize,
    },

    // Operators and callers.
    Drain {
        worker: usize,
    },
    Insert {
        run: usize,
    },
    Cancel {
        run: usize,
    },
    Close {
        session: usize,
    },
    Push {
        run: usize,
        is_full: bool,
    },

    // The database.
    /// A slow call is executed, committed, or answered.
    Advance {
        call: usize,
    },

    // Upkeep. A process claims it, then does one of its tasks.
    Sweep {
        process: usize,
    },
    ExpireSessions {
        process: usize,
    },
    ExpireQueued {
        process: usize,
    },

    // A worker and its leases.
    Register {
        worker: usize,
    },
    Renew {
        worker: usize,
    },
    Fence {
        worker: usize,
    },
    Leave {
        worker: usize,
    },
    Acquire {
        worker: usize,
        session: usize,
    },
    /// The poll finds a lease that this incarnation does not know of, or the worker drains.
    Release {
        worker: usize,
        session: usize,
        epoch: u8,
    },
    /// Upkeep finds an ended session and cancels what is left of it.
    BeginRemoval {
        worker: usize,
        session: usize,
    },
    RemoveDirectory {
        worker: usize,
        session: usize,
    },

    // A worker and its runs.
    TakeAssigned {
        worker: usize,
        run: usize,
        epoch: u8,
    },
    TakeQueued {
        worker: usize,
        run: usize,
        epoch: u8,
    },
    CheckLease {
        worker: usize,
        run: usize,
    },
    Launch {
        worker: usize,
        run: usize,
    },
    /// The worker tells a sandbox when its lease ends.
    KeepAlive {
        worker: usize,
        run: usize,
    },
    NoticeCancel {
        worker: usize,
        run: usize,
    },
    Append {
        worker: usize,
        run: usize,
    },
    Exit {
        worker: usize,
        run: usize,
    },
    SendCommit {
        worker: usize,
        run: usize,
    },
    SendAbandon {
        worker: usize,
        run: usize,
        epoch: u8,
    },
    SendHandBack {
        worker: usize,
        run: usize,
        turn: u8,
    },
}

/// One step of the model: an action, and whether the call it sends is slow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The action.
    pub action: Action,
    /// Whether other steps may happen before the call is answered.
    pub is_slow: bool,
}

impl From<Action> for Step {
    fn from(action: Action) -> Self {
        Self { action, is_slow: false }
    }
}

impl Action {
    /// Whether it sends a statement to the database.
    pub(crate) fn sends(self) -> bool {
        matches!(
            self,
            Self::Insert { .. }
                | Self::Cancel { .. }
                | Self::Close { .. }
                | Self::Register { .. }
                | Self::Renew { .. }
                | Self::Leave { .. }
                | Self::Acquire { .. }
                | Self::Release { .. }
                | Self::RemoveDirectory { .. }
                | Self::TakeQueued { .. }
                | Self::Append { .. }
                | Self::SendCommit { .. }
                | Self::SendAbandon { .. }
                | Self::SendHandBack { .. }
        ) || self.upkeep().is_some()
    }

    /// The process and the statement of a task of upkeep.
    pub(crate) fn upkeep(self) -> Option<(usize, Statement)> {
        match self {
            Self::Sweep { process } => Some((process, Statement::Sweep)),
            Self::ExpireSessions { process } => Some((process, Statement::ExpireSessions)),
            Self::ExpireQueued { process } => Some((process, Statement::ExpireQueued)),
            _ => None,
        }
    }
}
