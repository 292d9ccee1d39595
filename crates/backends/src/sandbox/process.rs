//! The process that a mode started around `codelia-init`: init itself, a tool, or a container.

use std::{
    fmt::Debug,
    io,
    sync::{Mutex, PoisonError},
};

use async_trait::async_trait;
use codelia_policy::Plan;
use codelia_sys::{
    Errno, Pid,
    proc_self::MountTable,
    process::{ExitStatus, TreeRoot},
};
use codelia_types::Receipt;

use crate::sandbox::child::ChildProcess;

/// The process that a mode started for one sandbox.
///
/// On teardown the sandbox shuts the control socket down, which orders init to end, and calls
/// `wait`. If that takes too long it calls `kill` and `wait` again. Then it calls `remove`, once.
#[async_trait]
pub(crate) trait SandboxProcess: Send + Sync + Debug {
    /// Waits until it ends. Returns `true` if it exited and was not killed. Cancel-safe; may be
    /// called again.
    async fn wait(&mut self) -> bool;

    /// Kills it without waiting for its end.
    async fn kill(&mut self);

    /// Removes what it left on the host and counts what cannot be removed. The sandbox itself
    /// removes control groups and the processes in them.
    async fn remove(&mut self) -> Receipt {
        Receipt::default()
    }

    /// Whether it ended because it ran out of memory. Called when `codelia-init` did not report.
    async fn ran_out_of_memory(&mut self) -> bool {
        false
    }

    /// Limits how many pseudo-terminals the sandbox can open, if the mode did not when it created
    /// the sandbox and the worker is allowed to. Called when `codelia-init` is ready.
    fn limit_terminals(&self) -> Result<(), Errno> {
        Ok(())
    }

    /// Where the processes of the sandbox begin, with `codelia-init` as the first. `None` if this
    /// process does not see them.
    fn tool(&self) -> Option<TreeRoot> {
        None
    }

    /// The process of `codelia-init` if it shares our PID namespace. In its own namespace init
    /// kills all its processes in one step, and none of them can stop it, so it needs no help.
    fn init_in_host_namespace(&self) -> Option<Pid> {
        None
    }
}

/// The mounts of this process. `None` until they are first read.
static OWN_MOUNTS: Mutex<Option<MountTable>> = Mutex::new(None);

/// Texts that identify the mounts of a sandbox. None may appear in our own namespace.
#[derive(Debug)]
pub(crate) struct MountMarkers([String; 2]);

impl MountMarkers {
    pub(crate) fn from_plan(plan: &Plan) -> Self {
        Self([plan.sandbox.to_string(), format!(" {}/", plan.root.display())])
    }

    /// Counts the mounts that are left.
    pub(crate) fn count(&self) -> u32 {
        // If the list cannot be read, assume that a mount is left.
        self.try_count().map_or(1, count)
    }

    fn try_count(&self) -> io::Result<usize> {
        let mut table = OWN_MOUNTS.lock().unwrap_or_else(PoisonError::into_inner);
        let table = match &mut *table {
            Some(table) => table,
            unread => unread.insert(MountTable::open()?),
        };
        let is_ours = |line: &&str| self.0.iter().any(|marker| line.contains(marker));
        Ok(table.current()?.lines().filter(is_ours).count())
    }
}

/// A number in a receipt.
pub(crate) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// `codelia-init` as a direct child.
#[derive(Debug)]
pub(crate) struct InitProcess(pub(crate) ChildProcess);

#[async_trait]
impl SandboxProcess for InitProcess {
    async fn wait(&mut self) -> bool {
        matches!(self.0.wait().await, Ok(ExitStatus::Exited(_)))
    }

    async fn kill(&mut self) {
        if let Err(errno) = self.0.kill() {
            tracing::warn!(%errno, "codelia-init not killed");
        }
    }

    fn init_in_host_namespace(&self) -> Option<Pid> {
        self.0.pid()
    }
}
