//! The process of a tool around `codelia-init`.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use codelia_policy::Plan;
use codelia_sys::{
    Errno, Pid,
    process::{self, ExitStatus, TreeRoot},
};
use codelia_types::{Mode, Receipt};

use crate::{
    isolation,
    mounts::overlay::Namespaces,
    sandbox::{
        child::ChildProcess,
        process::{MountMarkers, SandboxProcess, count},
    },
};

use super::dirs::ToolDirs;

/// Checks of killed processes before they count as left, and the delay between them. A process
/// leaves its control group before it exits, and PID 1 of a namespace waits for all others first.
const MAX_EXIT_CHECKS: u32 = 200;
const EXIT_CHECK_DELAY: Duration = Duration::from_millis(10);

/// A tool. It exits after `codelia-init`, PID 1 of its namespace, has exited; by then the kernel
/// has killed all other processes of the namespace.
#[derive(Debug)]
pub(super) struct ToolProcess {
    process: ChildProcess,
    mode: Mode,
    /// Processes that had to be killed.
    killed: Vec<Pid>,
    mounts: MountMarkers,
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
        Self {
            process,
            mode: plan.mode,
            killed: Vec::new(),
            mounts: MountMarkers::from_plan(plan),
            dirs: Some(dirs),
            _namespaces: namespaces,
        }
    }

    /// The tool's descendants, with `codelia-init` among them.
    fn descendants(&self) -> Vec<Pid> {
        self.process.pid().and_then(|tool| process::descendants(tool).ok()).unwrap_or_default()
    }

    /// Waits for the killed processes to exit. Returns the number of those that do not.
    async fn survivors(&mut self) -> usize {
        for _ in 0..MAX_EXIT_CHECKS {
            self.killed.retain(|&pid| process::is_alive(pid));
            if self.killed.is_empty() {
                break;
            }
            tokio::time::sleep(EXIT_CHECK_DELAY).await;
        }
        self.killed.len()
    }
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

    fn tool(&self) -> Option<TreeRoot> {
        self.process.pid().map(TreeRoot::Parent)
    }

    /// nsjail mounts `/dev/pts` with the limit; bubblewrap cannot.
    fn limit_terminals(&self) -> Result<(), Errno> {
        match self.descendants().first() {
            Some(&init) if self.mode == Mode::Bwrap => isolation::limit_terminals(init),
            _ => Ok(()),
        }
    }

    async fn remove(&mut self) -> Receipt {
        Receipt {
            processes: count(self.survivors().await),
            mounts: self.mounts.count(),
            directories: count(self.dirs.take().map_or(0, ToolDirs::release)),
            ..Receipt::default()
        }
    }
}
