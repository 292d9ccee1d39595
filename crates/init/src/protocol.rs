//! The messages. The order is: `setup` → `ready`; `launch` → `started`; then `signal` and `kill` at
//! any time, until `exited`. `failed` may stand in the place of `ready`, `started` and `exited` and
//! is the last one. The end of the socket kills everything.

use std::{collections::BTreeMap, fmt, time::Duration};

pub use codelia_sys::process::Status;
use codelia_sys::{Errno, rlimit::Resource};
use serde::{Deserialize, Serialize};

/// What a backend says to init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Restrict yourself. Carries the entries of the control groups.
    Setup(Setup),
    /// Start the command. Carries stdin, stdout, stderr and the working directory.
    Launch(Launch),
    /// Send this signal to the command's process group.
    Signal(i32),
    /// Kill every process.
    Kill,
}

/// What holds for the whole sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// How many entries of control groups come with it.
    pub groups: usize,
}

/// The command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Program and arguments; a program without a slash is looked up in the PATH of `env`.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Limits of each process.
    pub rlimits: Vec<Rlimit>,
    /// Whether stdin is a terminal that becomes the controlling one.
    pub terminal: bool,
}

impl Launch {
    /// How many descriptors come with it.
    pub const DESCRIPTORS: usize = 4;
}

/// A limit of each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    /// Of what.
    pub resource: Resource,
    /// The most.
    pub most: u64,
}

/// What init says to its backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// Every restriction is in place; waiting for the command.
    Ready,
    /// The command was executed.
    Started,
    /// A step failed; nothing runs.
    Failed(Failure),
    /// The command ended, and every other process with it.
    Exited(Exit),
}

/// A step that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Which.
    pub step: Step,
    /// How the kernel refused.
    pub errno: i32,
}

impl Failure {
    /// The step failed with this errno.
    #[must_use]
    pub fn new(step: Step, errno: Errno) -> Self {
        Self { step, errno: errno.raw_os_error() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {:?}: {}", self.step, Errno::from_raw_os_error(self.errno))
    }
}

/// The steps that can fail, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Be the only thread and hold only the control socket.
    Claim,
    /// Understand a message.
    Understand,
    /// Point the own output to nowhere.
    SilenceOutput,
    /// Leave the terminal and the process group of the backend.
    LeaveSession,
    /// Keep the own memory from other processes.
    HideMemory,
    /// Become the parent of orphans.
    AdoptOrphans,
    /// See the descendants, to be able to kill them.
    SeeDescendants,
    /// Block signals and hear of children's ends.
    Signals,
    /// Enter the control groups.
    EnterGroups,
    /// Put arguments and environment together.
    Arguments,
    /// Start the command's process.
    Spawn,
    /// Have the command killed when init ends.
    DieWithInit,
    /// Begin a session for the command.
    NewSession,
    /// Put its streams in place.
    Streams,
    /// Give it its terminal.
    TakeTerminal,
    /// Go to its working directory.
    WorkingDirectory,
    /// Limit it.
    Rlimits,
    /// Keep every other descriptor from it.
    KeepDescriptors,
    /// Unblock signals.
    UnblockSignals,
    /// Execute it.
    Execute,
    /// Watch over it.
    Supervise,
}

/// How everything ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// How the command ended.
    pub status: Status,
    /// User and system time of the processes that were waited for.
    pub cpu_time: Duration,
    /// The largest resident memory of one process.
    pub peak_memory_bytes: u64,
}
