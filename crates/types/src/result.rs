//! The result of a run.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::{Outcome, Receipt, Usage, Violations};

/// A run's result, as its row keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// How it ended.
    pub outcome: Outcome,
    /// What it used.
    pub usage: Usage,
    /// What its sandbox left behind.
    pub receipt: Receipt,
    /// The session's directory.
    pub sandbox_root: String,
    /// From the launch being asked for to the command's execve.
    pub setup_time: Option<Duration>,
    /// Whether its sandbox was prepared before it was needed.
    pub prepared: bool,
    /// Limits that its mode could not enforce.
    pub unenforced: Vec<String>,
    /// All bytes of output kept.
    pub output_bytes: i64,
    /// Whether output was cut.
    pub output_truncated: bool,
    /// What it tried against its policy.
    pub violations: Violations,
}

/// A result that is stored: with it a run that was read before is whole, without being read again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedRun {
    /// The result.
    pub result: RunResult,
    /// Which attempt's it is.
    pub attempt: i32,
    /// When the command started.
    pub started_at: Option<OffsetDateTime>,
    /// When the run ended.
    pub ended_at: OffsetDateTime,
}
