//! How a run ended, what it used, what it left behind.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Reason;

/// How a run ended. A failing command is an outcome; an error means we failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "detail")]
pub enum Outcome {
    /// The command exited with this code.
    Exited(i32),
    /// This signal ended the command.
    Signaled(i32),
    /// Its time was over.
    TimedOut,
    /// Its caller, or the end of its session, canceled it.
    Canceled,
    /// It used up its memory.
    Oom,
    /// It used up this resource.
    Limit(String),
    /// It broke this rule of its policy.
    Violation(String),
    /// It could not be started.
    Refused(Refusal),
    /// Its worker died after it had started.
    Lost,
}

impl Outcome {
    /// The word for it, in metrics and the database.
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
            Self::Lost => "lost",
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

/// What a run used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// User and system time of all its processes.
    pub cpu_time: Duration,
    /// Largest memory.
    pub peak_memory_bytes: u64,
    /// Wall time from start to end.
    pub wall_time: Duration,
    /// Bytes read from devices.
    #[serde(default)]
    pub read_bytes: u64,
    /// Bytes written to files, whether they have reached a device or not.
    #[serde(default)]
    pub written_bytes: u64,
    /// Most processes and threads at once; 0 where the host does not count them.
    #[serde(default)]
    pub peak_processes: u64,
}

/// What a sandbox left behind when it was destroyed. All zero, or an alert.
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
    /// Whether nothing is left.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}
