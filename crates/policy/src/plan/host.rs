//! The facts about a host that a plan needs.

use serde::{Deserialize, Serialize};

use crate::Runtime;

/// The controls that a host can enforce in one mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforceable {
    /// The memory of all processes together.
    pub memory: bool,
    /// The CPU rate.
    pub cpu: bool,
    /// The number of processes and threads.
    pub pids: bool,
    /// A private network.
    pub network: bool,
    /// A private network whose only way out is the egress proxy.
    pub egress: bool,
    /// Which system calls the command makes.
    pub syscalls: bool,
    /// Which programs the command executes.
    pub executables: bool,
    /// Reporting and counting of blocked system calls.
    pub violations: bool,
    /// Reads that wait for a person's decision.
    #[serde(default)]
    pub asked_reads: bool,
    /// A layout of the workspace: parts of it read-only or without execution.
    #[serde(default)]
    pub layouts: bool,
    /// Overlays: host directories under a layer that is private to the session.
    pub overlays: bool,
    /// The rate of reads from a device.
    pub reads: bool,
    /// The rate of writes to a device.
    pub writes: bool,
    /// Which processors the command runs on.
    pub cpus: bool,
    /// Whether the worker watches the limits that it cannot enforce (best effort).
    pub watches: bool,
}

impl Enforceable {
    /// Every control.
    pub const EVERYTHING: Self = Self {
        memory: true,
        cpu: true,
        pids: true,
        network: true,
        egress: true,
        syscalls: true,
        executables: true,
        violations: true,
        asked_reads: true,
        layouts: true,
        overlays: true,
        reads: true,
        writes: true,
        cpus: true,
        watches: true,
    };

    /// Whether the host enforces the limits that every run has.
    #[must_use]
    pub fn limits(self) -> bool {
        self.memory && self.cpu && self.pids
    }
}

/// The facts about a host that a plan for an isolating mode needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// The controls that the host can enforce.
    pub enforceable: Enforceable,
    /// The host's programs and libraries that a sandbox shows.
    pub runtime: Runtime,
}

impl HostInfo {
    /// A host that can enforce every control, with the runtime of a Debian.
    #[must_use]
    pub fn fully_capable() -> Self {
        Self { enforceable: Enforceable::EVERYTHING, runtime: Runtime::debian() }
    }
}
