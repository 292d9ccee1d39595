//! The result of a run: one document, which the store keeps and a worker reports.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::{Changes, Outcome, Receipt, Usage, Violations};

/// The result of a run. Of a run that no worker finished, little more than the outcome is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// How the run ended.
    pub outcome: Outcome,
    /// The resources that the run used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Leftovers of the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Receipt>,
    /// The session's directory on the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_root: Option<String>,
    /// Time from the request to launch until the command's execve. `None` if it did not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setup_time: Option<Duration>,
    /// Whether the sandbox was prepared before the run needed it.
    #[serde(default)]
    pub prepared: bool,
    /// Fields of the limits that the mode could not enforce.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unenforced: Vec<String>,
    /// Fields of the limits that were only watched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub watched: Vec<String>,
    /// Bytes of output that were kept.
    #[serde(default)]
    pub output_bytes: i64,
    /// Whether output after the output limit was not kept.
    #[serde(default)]
    pub output_truncated: bool,
    /// Bytes of output that the command wrote, kept or not. `None` if nobody counted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_total: Option<i64>,
    /// The attempts to violate the policy.
    #[serde(default, skip_serializing_if = "Violations::is_empty")]
    pub violations: Violations,
    /// Changes of a transactional run. `None` if it was not one, or did not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<Changes>,
}

/// A result of which only the outcome is known.
impl From<Outcome> for RunResult {
    fn from(outcome: Outcome) -> Self {
        Self {
            outcome,
            usage: None,
            receipt: None,
            sandbox_root: None,
            setup_time: None,
            prepared: false,
            unenforced: Vec::new(),
            watched: Vec::new(),
            output_bytes: 0,
            output_truncated: false,
            output_total: None,
            violations: Violations::default(),
            changes: None,
        }
    }
}

/// The end of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedRun {
    /// When the command started.
    pub started_at: Option<OffsetDateTime>,
    /// When the run ended.
    pub ended_at: OffsetDateTime,
    /// The result.
    pub result: RunResult,
}

/// The end of a run as its worker committed it. It completes a run that was read before its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommittedRun {
    /// The attempt that ended, from 1.
    pub attempt: i32,
    /// The reason of the request to cancel it.
    pub cancel_reason: Option<String>,
    /// The end of the run.
    pub end: EndedRun,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChangesState, LostReason, Violation};

    fn committed(result: RunResult) -> CommittedRun {
        let end = EndedRun { started_at: None, ended_at: OffsetDateTime::UNIX_EPOCH, result };
        CommittedRun { attempt: 1, cancel_reason: None, end }
    }

    #[test]
    fn result_is_read_as_it_was_written() {
        let mut violations = Violations::default();
        let (kind, syscall) = (Violation::EXEC_DENIED.to_owned(), "execve".to_owned());
        violations.add(Violation {
            kind,
            syscall,
            nr: 59,
            args: [u64::MAX; 6],
            path: Some("/x".into()),
        });
        let full = RunResult {
            usage: Some(Usage {
                wall_time: Duration::from_nanos(1_000_000_007),
                ..Usage::default()
            }),
            receipt: Some(Receipt { mounts: 2, ..Receipt::default() }),
            sandbox_root: Some("/s".into()),
            setup_time: Some(Duration::from_nanos(300_001)),
            prepared: true,
            unenforced: vec!["limits.pids".into()],
            watched: vec!["limits.memory_bytes".into()],
            output_bytes: 3,
            output_truncated: true,
            output_total: Some(i64::MAX),
            violations,
            changes: Some(Changes::none(ChangesState::Held)),
            ..Outcome::Exited(7).into()
        };
        for result in [full, Outcome::Lost(LostReason::WorkerLost).into()] {
            let json = serde_json::to_vec(&committed(result.clone())).unwrap();
            assert_eq!(serde_json::from_slice::<CommittedRun>(&json).unwrap(), committed(result));
        }
    }

    #[test]
    fn outcome_alone_is_a_result() {
        let read: RunResult = serde_json::from_str(r#"{"outcome":{"kind":"canceled"}}"#).unwrap();
        assert_eq!(read, Outcome::Canceled.into());
    }
}
