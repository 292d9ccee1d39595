//! Database calls in flight. A statement that was sent may be executed at any later time, whether or
//! not its sender still waits, and what it read may have changed when it is committed.

use crate::state::{Assignment, Incarnation};

/// A statement of `crates/store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Statement {
    Insert {
        run: usize,
    },
    /// `sent` is the worker's clock when it sent the renewal.
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

/// A statement in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) statement: Statement,
    /// The sender. Unused for an insert, which an api sends.
    pub(crate) by: Incarnation,
    pub(crate) stage: Stage,
    /// Whether the sender waits for the answer.
    pub(crate) is_awaited: bool,
    /// Whether other steps may happen between its stages.
    pub(crate) is_slow: bool,
    /// Whether its sender was paused after it was sent.
    pub(crate) predates_pause: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    Sent,
    /// It holds its lock. Others see its effect when it is committed.
    Executed {
        /// The database's clock at that time. Only a renewal uses it.
        at: u8,
        /// The lease that an insert assigns its run under.
        assignment: Option<Assignment>,
    },
    Answered(Answer),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Answer {
    /// Success, with the epoch of an acquired lease or the turn of a begun run.
    Done(u8),
    /// A running run prevents the release.
    Busy,
    /// The conditions do not hold.
    Refused,
}

/// A row lock that a statement holds until it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lock {
    Worker(u8),
    /// Exclusive.
    Session,
    /// Shared by inserts.
    SessionShared,
    Run(usize),
}

impl Call {
    /// Whether it is an insert, which an api sends.
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

    /// Whether it holds this lock now.
    pub(crate) fn holds(&self, lock: Lock) -> bool {
        matches!(self.stage, Stage::Executed { .. }) && self.lock() == lock
    }

    pub(crate) fn assignment(&self, epoch: u8) -> Assignment {
        Assignment { incarnation: self.by, epoch }
    }
}
