//! The result of a run.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::{Changes, Outcome, Receipt, Usage, Violations};

/// The result of a run, as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// How the run ended.
    pub outcome: Outcome,
    /// The resources that the run used.
    pub usage: Usage,
    /// What the sandbox left behind.
    pub receipt: Receipt,
    /// The session's directory on the worker.
    pub sandbox_root: String,
    /// Time from the request to launch until the command's execve. `None` if it did not start.
    pub setup_time: Option<Duration>,
    /// Whether the sandbox was prepared before the run needed it.
    pub prepared: bool,
    /// Fields of the limits that the mode could not enforce.
    pub unenforced: Vec<String>,
    /// Fields of the limits that were only watched.
    pub watched: Vec<String>,
    /// Bytes of output that were kept.
    pub output_bytes: i64,
    /// Whether output after the output limit was not kept.
    pub output_truncated: bool,
    /// Bytes of output that the command wrote, kept or not.
    pub output_total: i64,
    /// The attempts to violate the policy.
    pub violations: Violations,
    /// What a transactional run changed. `None` if it was not one, or did not start.
    pub changes: Option<Changes>,
}

/// A committed result with its attempt and times. It completes a run that was read before its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedRun {
    /// The result.
    pub result: RunResult,
    /// The attempt that ended, from 1.
    pub attempt: i32,
    /// When the command started.
    pub started_at: Option<OffsetDateTime>,
    /// When the run ended.
    pub ended_at: OffsetDateTime,
    /// The reason of the request to cancel it.
    pub cancel_reason: Option<String>,
}
