//! Database calls in flight. A statement that was sent may be executed at any later time, whether
//! or not its sender still waits, and what it read may have changed when it is committed.

use crate::{
    local::RunResult,
    state::{Assignment, Incarnation, Mask, Time},
};

/// A statement of `crates/store`. `statements.md` names the function of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Statement {
    Insert {
        run: usize,
    },
    Cancel {
        run: usize,
    },
    Close {
        session: usize,
    },
    /// `replaces` is the incarnation that the worker found; `sent` is the time on its clock.
    Register {
        number: u8,
        replaces: u8,
        sent: Time,
    },
    Renew {
        sent: Time,
    },
    Leave,
    Acquire {
        session: usize,
    },
    Release {
        session: usize,
        epoch: u8,
    },
    EndDataLost {
        session: usize,
        epoch: u8,
    },
    MarkRemoved {
        session: usize,
    },
    Begin {
        run: usize,
        epoch: u8,
    },
    HandBack {
        run: usize,
        turn: u8,
    },
    Append {
        run: usize,
        epoch: u8,
        start: u8,
    },
    Commit {
        run: usize,
        epoch: u8,
        result: RunResult,
    },
    Abandon {
        run: usize,
        epoch: u8,
    },
    Sweep,
    ExpireSessions,
    ExpireQueued,
}

/// Who sent a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Sender {
    /// An api, for a caller.
    Caller,
    /// A process that does the upkeep.
    Upkeep(usize),
    Worker(Incarnation),
}

/// A statement in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) statement: Statement,
    pub(crate) by: Sender,
    pub(crate) stage: Stage,
    /// Whether the sender waits for the answer.
    pub(crate) is_awaited: bool,
    /// Whether other steps may happen between its stages.
    pub(crate) is_slow: bool,
    /// Whether its sender was paused, or the database's clock jumped, after it was sent.
    pub(crate) predates_fault: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    Sent,
    /// Executed: the statement holds its locks. Others see its effect when it is committed.
    Executed(Effect),
    Answered(Answer),
}

/// The result of executing a statement: what it read and will change. It locks the rows in the
/// masks until it is committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Effect {
    pub(crate) workers: Mask,
    pub(crate) sessions: Mask,
    pub(crate) runs: Mask,
    /// The database's clock, if the statement stores it.
    pub(crate) at: Time,
    /// The lease that an insert assigns its run under.
    pub(crate) assignment: Option<Assignment>,
    /// Whether a hand-back ends the run, because its session has ended.
    pub(crate) ends_run: bool,
    /// Whether a queued run makes its session wait for a worker, because no live one holds it.
    pub(crate) waits: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    Done,
    /// The epoch of an acquired lease, and whether the session must have files.
    Acquired {
        epoch: u8,
        has_files: bool,
    },
    /// The turn of a begun run, and whether its cancellation is requested.
    Begun {
        turn: u8,
        is_canceled: bool,
    },
    /// A running run prevents the release.
    Busy,
    /// The conditions do not hold.
    Refused,
}

impl Call {
    /// The worker that sent it.
    pub(crate) fn worker(&self) -> Option<usize> {
        self.incarnation().map(|by| by.worker)
    }

    /// The incarnation that sent it.
    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        if let Sender::Worker(by) = self.by { Some(by) } else { None }
    }

    /// The rows that it holds locks on, if it was executed.
    pub(crate) fn locked(&self) -> Option<&Effect> {
        if let Stage::Executed(effect) = &self.stage { Some(effect) } else { None }
    }
}
