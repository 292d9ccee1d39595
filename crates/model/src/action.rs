//! The steps that the checker can take.

/// One action of the environment, a worker or the database. Workers and runs are indices; `call` is
/// an index into the calls in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are enough")]
pub enum Action {
    Tick,
    Crash {
        worker: usize,
    },
    Pause {
        worker: usize,
        clock_stops: bool,
    },
    /// Time passes, but not on this worker's clock.
    LoseTick {
        worker: usize,
    },
    /// The connection breaks. The statement is lost, or continues without a receiver.
    BreakConnection {
        call: usize,
        is_lost: bool,
    },
    Drain {
        worker: usize,
    },
    Partition {
        worker: usize,
    },
    Reconnect {
        worker: usize,
    },
    Resume {
        worker: usize,
    },
    Restart {
        worker: usize,
    },
    Insert {
        run: usize,
    },
    Push {
        run: usize,
        is_full: bool,
    },
    Sweep,
    /// A slow call is executed, committed, or answered.
    Advance {
        call: usize,
    },
    Register {
        worker: usize,
    },
    Renew {
        worker: usize,
    },
    Fence {
        worker: usize,
    },
    Acquire {
        worker: usize,
    },
    /// The poll finds a lease that this incarnation does not know of, or the worker drains.
    Release {
        worker: usize,
        epoch: u8,
    },
    Leave {
        worker: usize,
    },
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
    Exit {
        worker: usize,
        run: usize,
    },
    SendCommit {
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
                | Self::Renew { .. }
                | Self::Acquire { .. }
                | Self::Release { .. }
                | Self::TakeQueued { .. }
                | Self::SendCommit { .. }
                | Self::SendHandBack { .. }
        )
    }
}
