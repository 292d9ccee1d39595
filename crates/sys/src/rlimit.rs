//! Resource limits of one process, inherited by its children.

use rustix::{
    io::Errno,
    process::{Rlimit, getrlimit, setrlimit},
};
use serde::{Deserialize, Serialize};

/// A limited resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Open files.
    OpenFiles,
    /// Size of a core dump in bytes.
    CoreBytes,
    /// Size of a written file in bytes.
    FileBytes,
    /// CPU time of one process in seconds.
    CpuSeconds,
}

/// Lowers a soft and hard limit of this process, irrevocably. Keeps a limit that is lower already.
///
/// # Errors
/// As `setrlimit(2)`.
pub fn lower(resource: Resource, max: u64) -> Result<(), Errno> {
    let (resource, grace) = match resource {
        Resource::OpenFiles => (rustix::process::Resource::Nofile, 0),
        Resource::CoreBytes => (rustix::process::Resource::Core, 0),
        Resource::FileBytes => (rustix::process::Resource::Fsize, 0),
        // The soft limit sends SIGXCPU, which shows the cause; the hard limit sends SIGKILL.
        Resource::CpuSeconds => (rustix::process::Resource::Cpu, 1),
    };
    let previous_hard = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let hard = previous_hard.min(max.saturating_add(grace));
    setrlimit(resource, Rlimit { current: Some(max.min(hard)), maximum: Some(hard) })
}

/// The hard limit on the number of processes of a user, which a child of this process inherits.
#[must_use]
pub fn max_processes() -> u64 {
    getrlimit(rustix::process::Resource::Nproc).maximum.unwrap_or(u64::MAX)
}
