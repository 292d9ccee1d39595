//! Cgroup controllers, and the versions of the hierarchies that have them.

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

    /// Every controller, in the order of the variants.
    pub(super) const ALL: [Self; 6] =
        [Self::Memory, Self::Pids, Self::Cpu, Self::Cpuacct, Self::Io, Self::Cpuset];

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
    pub(super) fn name_v1(self) -> &'static str {
        match self {
            Self::Io => "blkio",
            other => other.as_str(),
        }
    }
}

/// The cgroup version of a hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
}
