//! The security part of a plan: system calls, programs and processes.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::host::Enforceable;
use crate::{FilesystemMode, IsolationLevel, LoggingPolicy, Mount, Policy, SyscallMode, syscalls};

/// The number of blocked system calls that ends a run, unless its policy sets another.
pub(crate) const DEFAULT_VIOLATION_LIMIT: u32 = 50;

/// Rules that the kernel enforces on a command, the same in every isolating mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// The system calls that the command may make.
    pub syscalls: SyscallRules,
    /// The number of blocked calls that ends the run. `None` if the host cannot report blocked
    /// calls; it still blocks them.
    pub violation_limit: Option<u32>,
    /// Whether the command may start processes. It may always start threads.
    pub fork: bool,
    /// Whether the command may execute another program.
    pub exec: bool,
    /// The only programs that may be executed. `None` allows every visible program.
    pub executables: Option<Vec<PathBuf>>,
    /// Whether the command's processes may trace each other.
    pub debug: bool,
    /// Paths below which the first read of a file waits for a decision. Empty if no read waits.
    #[serde(default)]
    pub asked_reads: Vec<PathBuf>,
    /// Calls of the command that are logged.
    #[serde(default)]
    pub logged: LoggedCalls,
}

/// Groups of system calls that are logged and then continue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedCalls {
    /// Calls that send signals.
    pub signals: bool,
    /// Calls that change files.
    pub files: bool,
}

impl LoggedCalls {
    /// Whether any call is logged.
    #[must_use]
    pub fn any(self) -> bool {
        self.signals || self.files
    }

    fn from_policy(policy: &Policy) -> Self {
        let LoggingPolicy { signals, file_operations } = policy.logging;
        Self { signals: signals == Some(true), files: file_operations == Some(true) }
    }
}

/// A system call filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "mode", content = "names")]
pub enum SyscallRules {
    /// Allow only these system calls. Shared: most plans have the same list of hundreds.
    Allow(Arc<[String]>),
    /// Allow every system call except these.
    Deny(Arc<[String]>),
}

impl Security {
    pub(super) fn from_policy(
        policy: &Policy,
        level: IsolationLevel,
        host: Enforceable,
        mounts: &[Mount],
    ) -> Self {
        let process = &policy.process;
        let debug = process.debug.unwrap_or(false);
        Self {
            syscalls: SyscallRules::Allow(allowed_syscalls(policy, level, debug)),
            violation_limit: host.violations.then(|| violation_limit(policy)),
            fork: process.allow_fork.unwrap_or(true),
            exec: process.allow_exec.unwrap_or(true),
            executables: process.allowed_executables.clone(),
            debug,
            asked_reads: asked_reads(policy, mounts),
            logged: LoggedCalls::from_policy(policy),
        }
    }
}

impl Security {
    /// Paths that a command reads without a decision: all mounts but those that are asked for and
    /// what they cover.
    #[must_use]
    pub fn free_reads(&self, mounts: &[Mount]) -> Vec<PathBuf> {
        let is_file_tree =
            |mount: &&Mount| !matches!(mount, Mount::Symlink { .. } | Mount::Hidden { .. });
        let targets = mounts.iter().filter(is_file_tree).map(Mount::target);
        let is_free =
            |target: &&Path| !self.asked_reads.iter().any(|asked| target.starts_with(asked));
        targets.filter(is_free).map(Path::to_owned).collect()
    }
}

/// Host paths that the policy opens in mode `dynamic`.
fn asked_reads(policy: &Policy, mounts: &[Mount]) -> Vec<PathBuf> {
    if policy.filesystem.mode != Some(FilesystemMode::Dynamic) {
        return Vec::new();
    }
    let opened = mounts.iter().filter(|mount| matches!(mount, Mount::Bind { writable: false, .. }));
    opened.map(|mount| mount.target().to_owned()).collect()
}

pub(super) fn violation_limit(policy: &Policy) -> u32 {
    policy.syscalls.violation_limit.unwrap_or(DEFAULT_VIOLATION_LIMIT)
}

/// The list of the level, narrowed by the policy.
fn allowed_syscalls(policy: &Policy, level: IsolationLevel, debug: bool) -> Arc<[String]> {
    let allowed = match level {
        IsolationLevel::Full => syscalls::allowed(debug),
        IsolationLevel::Process | IsolationLevel::None => syscalls::allowed_at_process_level(debug),
    };
    if policy.syscalls.mode.is_none() {
        return allowed;
    }
    let names: HashSet<_> = policy.syscalls.names.iter().collect();
    let is_kept = |name: &String| match policy.syscalls.mode {
        None => true,
        Some(SyscallMode::Allow) => names.contains(name),
        Some(SyscallMode::Deny) => !names.contains(name),
    };
    allowed.iter().filter(|name| is_kept(name)).cloned().collect()
}
