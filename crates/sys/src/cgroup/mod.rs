//! Control groups, version 1 and 2 behind one type.
//!
//! A sandbox gets one leaf group in each hierarchy it needs. Only groups made here are changed,
//! but for the switch that lets a parent of version 2 have limited children.

mod delegation;
mod device;
mod group;
mod hierarchy;
mod leaf;
mod owner;
mod processors;

use std::os::fd::AsFd;

use rustix::io::Errno;

pub use device::{Device, DeviceLimits};
pub use group::{Group, Limits, Usage};
pub use hierarchy::{CgroupParent, Hierarchy};

/// Moves this process, which has one thread, into the group of an entry.
///
/// # Errors
/// As `write(2)` to a group's list of processes.
pub fn enter(entry: impl AsFd) -> Result<(), Errno> {
    rustix::io::write(entry, b"0").map(drop)
}

/// Something that is limited or counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Controller {
    /// Memory of all processes together.
    Memory,
    /// Number of processes and threads.
    Pids,
    /// CPU rate.
    Cpu,
    /// CPU time, counted and not limited.
    Cpuacct,
    /// How fast devices are used. Only where somebody asks for it.
    Io,
    /// Which processors are used. Only where somebody asks for it.
    Cpuset,
}

impl Controller {
    /// Those that limit.
    pub const LIMITING: [Self; 3] = [Self::Memory, Self::Pids, Self::Cpu];

    /// All of them.
    const ALL: [Self; 6] = [Self::Memory, Self::Pids, Self::Cpu, Self::Cpuacct, Self::Io, Self::Cpuset];

    /// The kernel's name for it, in version 1.
    fn name_in_version_1(self) -> &'static str {
        match self {
            Self::Io => "blkio",
            other => other.as_str(),
        }
    }

    /// The kernel's name for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Cpuset => "cpuset",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}
