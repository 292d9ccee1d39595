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
    /// Processes and threads of the user, counted in its user namespace since Linux 5.14.
    Processes,
    /// Queued signals and POSIX timers of the user.
    PendingSignals,
    /// Bytes in POSIX message queues of the user.
    MessageQueueBytes,
}

/// Lowers a soft and hard limit of this process, irrevocably. Keeps a limit that is lower already,
/// except that of core dumps: there 0 is weaker than 1, with which the kernel does not start the
/// host's core dump handler.
///
/// # Errors
/// As `setrlimit(2)`: `EPERM` if the limit of core dumps is 0 already.
pub fn lower(resource: Resource, max: u64) -> Result<(), Errno> {
    use rustix::process::Resource as Kernel;
    let (resource, grace) = match resource {
        Resource::CoreBytes => {
            return setrlimit(Kernel::Core, Rlimit { current: Some(max), maximum: Some(max) });
        }
        Resource::OpenFiles => (Kernel::Nofile, 0),
        Resource::FileBytes => (Kernel::Fsize, 0),
        // The soft limit sends SIGXCPU, which shows the cause; the hard limit sends SIGKILL.
        Resource::CpuSeconds => (Kernel::Cpu, 1),
        Resource::Processes => (Kernel::Nproc, 0),
        Resource::PendingSignals => (Kernel::Sigpending, 0),
        Resource::MessageQueueBytes => (Kernel::Msgqueue, 0),
    };
    let previous_hard = getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let hard = previous_hard.min(max.saturating_add(grace));
    setrlimit(resource, Rlimit { current: Some(max.min(hard)), maximum: Some(hard) })
}

/// Raises the hard limit of core dumps of this process to 1 if it is 0, so that its children can
/// set a limit of 1.
///
/// # Errors
/// As `setrlimit(2)`: `EPERM` without privileges.
pub fn permit_core_limit() -> Result<(), Errno> {
    let limit = getrlimit(rustix::process::Resource::Core);
    match limit.maximum {
        Some(0) => setrlimit(rustix::process::Resource::Core, Rlimit { maximum: Some(1), ..limit }),
        _ => Ok(()),
    }
}

/// The hard limit on the number of processes of a user, which a child of this process inherits.
#[must_use]
pub fn max_processes() -> u64 {
    getrlimit(rustix::process::Resource::Nproc).maximum.unwrap_or(u64::MAX)
}
