//! Cgroups, version 1 and 2 behind one type.
//!
//! A sandbox gets one cgroup in each hierarchy that it needs. Codelia changes only cgroups that it
//! created, except for `cgroup.subtree_control` of the parent in version 2.

mod cpuset;
mod delegation;
mod device;
mod group;
mod group_dir;
mod hierarchy;
mod orphans;
mod pool;
mod reader;

use std::os::fd::AsFd;

use rustix::io::Errno;

pub use device::{Device, DeviceLimits};
pub use group::{Group, Limits, Usage};
pub use hierarchy::{CgroupParent, Hierarchy};
pub use reader::{CurrentUsage, GroupReader};

/// Moves this process, which must have one thread, into a cgroup, through a descriptor of
/// [`Group::join_fds`].
///
/// # Errors
/// As `write(2)` to a cgroup's list of processes.
pub fn join(fd: impl AsFd) -> Result<(), Errno> {
    rustix::io::write(fd, b"0").map(drop)
}

/// A cgroup controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// Limits the memory of all processes together.
    Memory,
    /// Limits the number of processes and threads.
    Pids,
    /// Limits the CPU rate.
    Cpu,
    /// Counts CPU time. In version 2 no controller is needed for that.
    Cpuacct,
    /// Limits I/O rates of block devices. Enabled only for cgroups that need it.
    Io,
    /// Limits which CPUs are used. Enabled only for cgroups that need it.
    Cpuset,
}

impl Controller {
    /// The controllers that limit every sandbox.
    pub const LIMITING: [Self; 3] = [Self::Memory, Self::Pids, Self::Cpu];

    const ALL: [Self; 6] = [Self::Memory, Self::Pids, Self::Cpu, Self::Cpuacct, Self::Io, Self::Cpuset];

    /// The kernel's name in version 2.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Io => "io",
            Self::Cpuset => "cpuset",
        }
    }

    /// The kernel's name in version 1.
    fn name_v1(self) -> &'static str {
        match self {
            Self::Io => "blkio",
            other => other.as_str(),
        }
    }
}

/// The cgroup version of a hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}
