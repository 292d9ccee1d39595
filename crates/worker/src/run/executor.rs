//! Executes runs, and says why one may have no result. `execute` starts commands,
//! `supervise` stays with them, `commit` ends their runs.

use std::sync::Arc;

use codelia_types::Receipt;

use crate::{core::Core, sandbox::backends::Denial};

/// Executes runs that were activated and commits their results.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(crate) core: Arc<Core>,
}

/// Why a run has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// The lease is lost: the store decides what becomes of the run.
    LeaseLost,
    /// The command was not started, and this worker no longer holds its session or shuts down.
    NotHeld,
}

/// Why a command was not started.
#[derive(Debug)]
pub(crate) enum NotStarted {
    /// The run can have no sandbox.
    Denied(Denial),
    /// The run was canceled; the receipt of the sandbox that was prepared for it.
    Canceled(Receipt),
    /// The worker may not start it.
    NoResult(NoResult),
}

impl From<Denial> for NotStarted {
    fn from(denial: Denial) -> Self {
        Self::Denied(denial)
    }
}

impl From<NoResult> for NotStarted {
    fn from(no_result: NoResult) -> Self {
        Self::NoResult(no_result)
    }
}
