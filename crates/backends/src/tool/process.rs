//! The process of a tool around `codelia-init`.

use std::{fs, path::Path, sync::Arc};

use async_trait::async_trait;
use codelia_policy::Plan;
use codelia_sys::{
    Errno, Pid,
    process::{self, ExitStatus},
};
use codelia_types::{Mode, Receipt};

use crate::{
    isolation,
    sandbox::{child::ChildProcess, process::SandboxProcess},
};

use super::{dirs::ToolDirs, overlay::Namespaces};

/// A tool. It exits after `codelia-init`, PID 1 of its namespace, has exited; by then the kernel
/// has killed all other processes of the namespace.
#[derive(Debug)]
pub(super) struct ToolProcess {
    process: ChildProcess,
    mode: Mode,
    /// Processes that had to be killed.
    killed: Vec<Pid>,
    /// Text that identifies a mount of the sandbox. None may appear in our own namespace.
    mount_markers: [String; 2],
    /// Released when the sandbox is gone.
    dirs: Option<ToolDirs>,
    /// Keeps the session's overlays mounted while this sandbox lives.
    _namespaces: Option<Arc<Namespaces>>,
}

impl ToolProcess {
    pub(super) fn new(
        process: ChildProcess,
        plan: &Plan,
        dirs: ToolDirs,
        namespaces: Option<Arc<Namespaces>>,
    ) -> Self {
        let below_root = format!(" {}/", plan.root.display());
        Self {
            process,
            mode: plan.mode,
            killed: Vec::new(),
            mount_markers: [plan.sandbox.to_string(), below_root],
            dirs: Some(dirs),
            _namespaces: namespaces,
        }
    }

    /// The tool's descendants, with `codelia-init` among them.
    fn descendants(&self) -> Vec<Pid> {
        self.process.pid().and_then(|tool| process::descendants(tool).ok()).unwrap_or_default()
    }

    fn mounts_left(&self) -> usize {
        let is_ours = |line: &&str| self.mount_markers.iter().any(|marker| line.contains(marker));
        // If the list cannot be read, assume that a mount is left.
        read_mounts().map_or(1, |mounts| mounts.lines().filter(is_ours).count())
    }
}

fn read_mounts() -> Option<String> {
    fs::read_to_string(Path::new("/proc/self/mountinfo")).ok()
}

#[async_trait]
impl SandboxProcess for ToolProcess {
    async fn wait(&mut self) -> bool {
        matches!(self.process.wait().await, Ok(ExitStatus::Exited(_)))
    }

    /// Kills the descendants first: they cannot be found once the tool is dead.
    async fn kill(&mut self) {
        self.killed = self.descendants();
        for &pid in &self.killed {
            if let Err(errno) = process::kill(pid) {
                tracing::warn!(%errno, %pid, "sandbox process not killed");
            }
        }
        if let Err(errno) = self.process.kill() {
            tracing::warn!(%errno, "sandbox tool not killed");
        }
    }

    fn tool(&self) -> Option<Pid> {
        self.process.pid()
    }

    /// nsjail mounts `/dev/pts` with the limit; bubblewrap cannot.
    fn limit_terminals(&self) -> Result<(), Errno> {
        match self.descendants().first() {
            Some(&init) if self.mode == Mode::Bwrap => isolation::limit_terminals(init),
            _ => Ok(()),
        }
    }

    async fn remove(&mut self) -> Receipt {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        Receipt {
            processes: count(self.killed.iter().filter(|&&pid| process::is_alive(pid)).count()),
            mounts: count(self.mounts_left()),
            directories: count(self.dirs.take().map_or(0, ToolDirs::release)),
            ..Receipt::default()
        }
    }
}
