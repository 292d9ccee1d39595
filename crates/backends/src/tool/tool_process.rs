//! The process of a tool around `codelia-init`: its end, its death, and what it leaves.

use std::{fs, path::Path, sync::Arc};

use async_trait::async_trait;
use codelia_policy::Plan;
use codelia_sys::{
    Pid,
    process::{self, ExitStatus},
};
use codelia_types::Receipt;

use crate::{
    sandbox::process::Process, sandbox::sandbox_process::Holder, tool::overlay::Spaces,
    tool::tool_dirs::Scratch,
};

/// A tool that ends when `codelia-init`, the first process of its namespace, has ended: by then the
/// kernel has ended all the others.
#[derive(Debug)]
pub(crate) struct ToolProcess {
    process: Process,
    /// What had to be killed.
    killed: Vec<Pid>,
    /// How a mount of the sandbox would be called in our own namespace, where none belongs.
    names: [String; 2],
    /// Given back when the sandbox is gone.
    scratch: Option<Scratch>,
    /// Lives on for the next sandbox of the session as long as one does.
    _overlays: Option<Arc<Spaces>>,
}

impl ToolProcess {
    pub(crate) fn new(
        process: Process,
        plan: &Plan,
        scratch: Scratch,
        overlays: Option<Arc<Spaces>>,
    ) -> Self {
        let below_root = format!(" {}/", plan.root.display());
        Self {
            process,
            killed: Vec::new(),
            names: [plan.sandbox.to_string(), below_root],
            scratch: Some(scratch),
            _overlays: overlays,
        }
    }

    /// The tool's children, `codelia-init` among them, which nobody else would wait for.
    fn children(&self) -> Vec<Pid> {
        self.process.id().and_then(|tool| process::descendants(tool).ok()).unwrap_or_default()
    }

    fn mounts_left(&self) -> usize {
        let is_ours = |line: &&str| self.names.iter().any(|name| line.contains(name));
        // A list that cannot be read is not an empty one.
        read_mounts().map_or(1, |mounts| mounts.lines().filter(is_ours).count())
    }
}

fn read_mounts() -> Option<String> {
    fs::read_to_string(Path::new("/proc/self/mountinfo")).ok()
}

#[async_trait]
impl Holder for ToolProcess {
    async fn ended(&mut self) -> bool {
        matches!(self.process.ended().await, Ok(ExitStatus::Exited(_)))
    }

    /// Its children first, as long as it tells of them.
    async fn kill(&mut self) {
        self.killed = self.children();
        for &pid in &self.killed {
            if let Err(errno) = process::kill(pid) {
                tracing::warn!(%errno, %pid, "a process of a sandbox was not killed");
            }
        }
        if let Err(errno) = self.process.kill() {
            tracing::warn!(%errno, "the tool of a sandbox was not killed");
        }
    }

    async fn remove(&mut self) -> Receipt {
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        Receipt {
            processes: count(self.killed.iter().filter(|&&pid| process::is_alive(pid)).count()),
            mounts: count(self.mounts_left()),
            directories: count(self.scratch.take().map_or(0, Scratch::leave)),
            ..Receipt::default()
        }
    }
}
