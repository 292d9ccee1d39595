//! Limits of one process, inherited by what it starts.

use rustix::{
    io::Errno,
    process::{Rlimit, getrlimit, setrlimit},
};
use serde::{Deserialize, Serialize};

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Open files.
    OpenFiles,
    /// Bytes of a core dump.
    CoreBytes,
    /// Bytes of a file that is written.
    FileBytes,
    /// CPU time of one process.
    CpuSeconds,
}

/// Limits this process, for good. A lower limit that holds already stays.
///
/// # Errors
/// As `setrlimit(2)`.
pub fn lower(resource: Resource, most: u64) -> Result<(), Errno> {
    let (resource, grace) = match resource {
        Resource::OpenFiles => (rustix::process::Resource::Nofile, 0),
        Resource::CoreBytes => (rustix::process::Resource::Core, 0),
        Resource::FileBytes => (rustix::process::Resource::Fsize, 0),
        // At the limit itself the kernel sends a signal that says why, at the maximum it kills.
        Resource::CpuSeconds => (rustix::process::Resource::Cpu, 1),
    };
    let hard = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let maximum = hard.min(most.saturating_add(grace));
    setrlimit(resource, Rlimit { current: Some(most.min(maximum)), maximum: Some(maximum) })
}

/// How many processes the user of a program may have that is started from here.
#[must_use]
pub fn max_processes() -> u64 {
    getrlimit(rustix::process::Resource::Nproc).maximum.unwrap_or(u64::MAX)
}
