//! The outcome of a run, its resource usage, and the receipt of its sandbox.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Reason, words};

/// How a run ended. A command that fails is an outcome; an error means that Codelia failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "detail")]
pub enum Outcome {
    /// The command exited with this code.
    Exited(i32),
    /// This signal terminated the command.
    Signaled(i32),
    /// The run exceeded its timeout.
    TimedOut,
    /// The caller, or the end of the session, canceled the run.
    Canceled,
    /// The run exceeded its memory limit.
    Oom,
    /// The run exceeded the limit of this resource.
    Limit(String),
    /// The run violated this rule of its policy.
    Violation(String),
    /// The run could not be started.
    Refused(Refusal),
    /// The command had started, and its result is unknown.
    Lost(LostReason),
}

words! {
    /// Why the result of a run is unknown.
    pub enum LostReason {
        /// The worker lost its lease: it died, was paused or was cut off from the database.
        WorkerLost = "worker_lost",
        /// The worker shut down and could not wait longer for the command.
        DrainDeadline = "drain_deadline",
        /// The database rejected the result.
        ResultRejected = "result_rejected",
    }
}

impl Outcome {
    /// The words for all outcomes.
    pub const KINDS: [&str; 9] = [
        "exited",
        "signaled",
        "timed_out",
        "canceled",
        "oom",
        "limit",
        "violation",
        "refused",
        "lost",
    ];

    /// The word for the outcome in metrics and the database.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Exited(_) => "exited",
            Self::Signaled(_) => "signaled",
            Self::TimedOut => "timed_out",
            Self::Canceled => "canceled",
            Self::Oom => "oom",
            Self::Limit(_) => "limit",
            Self::Violation(_) => "violation",
            Self::Refused(_) => "refused",
            Self::Lost(_) => "lost",
        }
    }
}

/// Why a run could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The reason, for programs.
    pub reason: Reason,
    /// The details, for people.
    pub message: String,
}

/// The resources that a run used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// User and system CPU time of all processes.
    pub cpu_time: Duration,
    /// Peak memory of all processes together, in bytes.
    pub peak_memory_bytes: u64,
    /// Wall time from start to end.
    pub wall_time: Duration,
    /// Bytes read from devices.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes written to files, including those not yet on a device.
    #[serde(default)]
    pub written_bytes: u64,
    /// Peak number of processes and threads. 0 if the host does not count them.
    #[serde(default)]
    pub peak_processes: u64,
    /// The traffic through the egress proxy. `None` in network mode `host`, and in `none` if the
    /// run tried nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkUsage>,
}

/// The traffic of a run through the egress proxy, and its attempts to go around it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkUsage {
    /// Connections that were allowed.
    pub connections: u64,
    /// Connections, requests and names that were refused.
    pub refused: u64,
    /// Bytes from the run.
    pub sent_bytes: u64,
    /// Bytes to the run.
    pub received_bytes: u64,
    /// Attempts to reach an address directly, to which a sandbox has no route.
    #[serde(default)]
    pub unreachable_attempts: u64,
}

/// Leftovers of a sandbox when it was destroyed. Anything but zero raises an alert.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Processes.
    pub processes: u32,
    /// Mounts.
    pub mounts: u32,
    /// Control groups.
    pub cgroups: u32,
    /// Sockets.
    pub sockets: u32,
    /// Directories.
    pub directories: u32,
}

impl Receipt {
    /// Whether nothing was left behind.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processes, mounts, cgroups, sockets, directories } = self;
        write!(
            f,
            "{processes} processes, {mounts} mounts, {cgroups} cgroups, {sockets} sockets, {directories} directories"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_is_stored_as_kind_and_detail() {
        let refusal = Refusal { reason: Reason::SandboxFailed, message: "no".to_owned() };
        let outcomes = [
            (Outcome::Exited(3), r#"{"kind":"exited","detail":3}"#.to_owned()),
            (Outcome::Oom, r#"{"kind":"oom"}"#.to_owned()),
            (Outcome::TimedOut, r#"{"kind":"timed_out"}"#.to_owned()),
            (
                Outcome::Refused(refusal),
                r#"{"kind":"refused","detail":{"reason":"SANDBOX_FAILED","message":"no"}}"#
                    .to_owned(),
            ),
        ];
        let lost = LostReason::ALL.map(|reason| {
            (Outcome::Lost(reason), format!(r#"{{"kind":"lost","detail":"{}"}}"#, reason.as_str()))
        });
        for (outcome, json) in outcomes.into_iter().chain(lost) {
            assert_eq!(serde_json::to_string(&outcome).unwrap(), json);
            assert_eq!(serde_json::from_str::<Outcome>(&json).unwrap(), outcome);
        }
    }
}
