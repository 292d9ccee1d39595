//! Statements on their way to the database, in it, and back. One that was sent may be executed at
//! any later time, whether or not its sender still waits; what it looked at may have changed by the
//! time it is committed.

use crate::state::{Claim, Life};

/// What is asked of the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Statement {
    Insert {
        run: usize,
    },
    /// `sent`: when, on the worker's clock.
    Renew {
        sent: u8,
    },
    Acquire,
    Release {
        epoch: u8,
    },
    Begin {
        run: usize,
        epoch: u8,
    },
    HandBack {
        run: usize,
        turn: u8,
    },
    Commit {
        run: usize,
        epoch: u8,
    },
}

/// A statement and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Flight {
    pub(crate) statement: Statement,
    /// Who sent it; meaningless for an insert, which is an api's.
    pub(crate) by: Life,
    pub(crate) stage: Stage,
    /// Whether somebody waits for its answer.
    pub(crate) is_awaited: bool,
    /// Whether anything may happen between its steps; else they are made at once.
    pub(crate) is_slow: bool,
    /// Whether its sender was paused since it was sent.
    pub(crate) is_old: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    Sent,
    /// It was executed and holds its locks; others see its effect when it is committed.
    Executed {
        /// The database's clock then; only a renewal needs it.
        at: u8,
        /// For whom an insert records its run.
        claim: Option<Claim>,
    },
    Answered(Answer),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    /// It was done; the epoch of an acquisition, the turn of a beginning.
    Done(u8),
    /// A run is in the way of a release.
    Busy,
    /// The sender has no right to it.
    Refused,
}

/// A row that a statement holds until it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lock {
    Worker(u8),
    /// Nobody else may even look at it under a lock.
    Session,
    /// Inserts share it.
    SessionShared,
    Run(usize),
}

impl Flight {
    /// An insert is an api's, not a worker's.
    pub(crate) fn is_insert(&self) -> bool {
        matches!(self.statement, Statement::Insert { .. })
    }

    pub(crate) fn lock(&self) -> Lock {
        match self.statement {
            Statement::Insert { .. } => Lock::SessionShared,
            Statement::Renew { .. } => Lock::Worker(self.by.worker),
            Statement::Acquire | Statement::Release { .. } => Lock::Session,
            Statement::Begin { run, .. }
            | Statement::HandBack { run, .. }
            | Statement::Commit { run, .. } => Lock::Run(run),
        }
    }

    /// Whether it holds its lock now.
    pub(crate) fn holds(&self, lock: Lock) -> bool {
        matches!(self.stage, Stage::Executed { .. }) && self.lock() == lock
    }

    pub(crate) fn claim(&self, epoch: u8) -> Claim {
        Claim { life: self.by, epoch }
    }
}
