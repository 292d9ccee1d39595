//! The plug point: what every mode provides.

use std::{os::fd::OwnedFd, time::Duration};

use async_trait::async_trait;
use codelia_policy::{Enforceable, Plan};
use codelia_types::{CommandSpec, Mode, Outcome, Receipt, Usage, Violation};
use tokio::sync::mpsc;

use crate::Error;

/// A mode. The worker calls `probe` once at its start, then `prepare` for each sandbox, and `sweep`
/// beside that.
#[async_trait]
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Which mode it is.
    fn mode(&self) -> Mode;

    /// Finds out by trying what this host can enforce. Never fails: a gap is part of the answer.
    async fn probe(&self) -> Capabilities;

    /// Removes what the sandboxes of workers that were killed left on this host, and tells how much
    /// it removed. Idempotent; the worker calls it at its start and again and again.
    ///
    /// # Errors
    /// It could not be looked for.
    async fn sweep(&self) -> Result<usize, Error>;

    /// Takes away what the sandboxes of this process share on the host, when none of them is left.
    fn shutdown(&self) {}

    /// Carries out the whole plan, with `codelia-init` waiting inside for its command.
    ///
    /// # Errors
    /// Nothing of the sandbox is left after an error.
    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error>;
}

/// A sandbox that waits for its command. It ends by `launch` or by `discard`; dropped, it is
/// destroyed in the background.
#[async_trait]
pub trait Prepared: Send + Sync + std::fmt::Debug {
    /// Hands the command over and returns when it was executed (its `execve` succeeded).
    ///
    /// # Errors
    /// [`Error::Refused`] if the command cannot be executed (not found, not executable, bad working
    /// directory): an outcome for the caller. Nothing of the sandbox is left after any error.
    async fn launch(self: Box<Self>, command: &CommandSpec, stdio: Stdio) -> Result<Launched, Error>;

    /// Whether it still waits: something may have ended it meanwhile. Such a one can only be discarded.
    fn is_alive(&self) -> bool {
        true
    }

    /// Destroys the sandbox unused.
    async fn discard(self: Box<Self>) -> Receipt;
}

/// A command that was started.
#[derive(Debug)]
pub struct Launched {
    /// The sandbox it runs in.
    pub running: Box<dyn Running>,
    /// From the launch being asked for to the command's `execve`.
    pub setup_time: Duration,
}

/// A sandbox whose command was started. It ends by `destroy`; dropped, it is destroyed in the
/// background.
#[async_trait]
pub trait Running: Send + Sync + std::fmt::Debug {
    /// Waits for the command's end. Every process it left behind is dead when this returns, so
    /// its pipes are at their end. Cancel-safe; may be called again and answers the same.
    async fn wait(&mut self) -> (Outcome, Usage);

    /// Sends a signal to the command's process group.
    async fn signal(&self, signal: i32);

    /// Lets the command go on for so long from now, unless this is said again: even if nobody is there to do it, it is
    /// killed then. Before it is first said nothing ends a command that its worker stands still beside.
    async fn keep_alive(&self, time: Duration);

    /// Has the command go after those that began later where processors are short: said of one that takes its time, so
    /// that short ones need not wait for it. Of a container's group the engine decides.
    fn lower_priority(&self);

    /// What the command tries against its policy, as it tries it: bounded, and at its end when the
    /// command is. Given once; `None` where nothing watches for it (mode `logical`).
    fn violations(&mut self) -> Option<mpsc::Receiver<Violation>> {
        None
    }

    /// Kills every process of the sandbox; `wait` then returns.
    async fn kill_tree(&self);

    /// Removes all that is left and counts what could not be removed.
    async fn destroy(self: Box<Self>) -> Receipt;
}

/// The command's three streams. With a terminal all three are its other side, and it becomes the
/// controlling terminal.
#[derive(Debug)]
pub struct Stdio {
    /// Standard input.
    pub stdin: OwnedFd,
    /// Standard output.
    pub stdout: OwnedFd,
    /// Standard error.
    pub stderr: OwnedFd,
}

/// What this host can enforce in one mode.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// The mode.
    pub mode: Mode,
    /// Whether a sandbox of this mode was started and destroyed successfully.
    pub usable: bool,
    /// Which parts of a plan can be enforced.
    pub enforceable: Enforceable,
    /// What is missing, and how to get it.
    pub gaps: Vec<Gap>,
}

/// Something a host lacks.
#[derive(Debug, Clone)]
pub struct Gap {
    /// What is missing.
    pub missing: String,
    /// How to get it.
    pub remedy: String,
}
