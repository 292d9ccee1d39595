//! Control groups, version 1 and 2 behind one type.
//!
//! A sandbox gets one leaf group in each hierarchy it needs. Only groups made here are changed,
//! but for the switch that lets a parent of version 2 have limited children.

mod delegation;
mod group;
mod hierarchy;
mod leaf;
mod owner;

use std::os::fd::AsFd;

use rustix::io::Errno;

pub use group::{Group, Limits, Usage};
pub use hierarchy::Hierarchy;

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
    CpuTime,
}

impl Controller {
    /// Those that limit.
    pub const LIMITING: [Self; 3] = [Self::Memory, Self::Pids, Self::Cpu];

    /// The kernel's name for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::CpuTime => "cpuacct",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}
