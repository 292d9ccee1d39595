//! The messages. The order is: `setup` → `ready`; then `signal`, `live` and `kill` at any time, until
//! `exited`. `failed` may stand in the place of `ready` and `exited` and is the last one. The end of
//! the socket kills everything.
//!
//! The command's process is there when init is ready, and has a socket of its own, the launch socket,
//! which comes with `ready`: `launch` goes there. The launch socket's end says that the command was
//! executed; a `failed` on it, that it was not. Where no descriptor can be passed out of the sandbox init
//! keeps that socket, `launch` comes on the control socket, and `launched` says what its end would.

use std::{collections::BTreeMap, fmt, path::PathBuf, time::Duration};

pub use codelia_sys::process::ExitStatus;
use codelia_sys::{Errno, rlimit::Resource};
use serde::{Deserialize, Serialize};

/// What a backend says to init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Restrict yourself and the command's process. Carries the entries of the control groups.
    Setup(Setup),
    /// Start the command; on the launch socket. Carries stdin, stdout, stderr and, if it names no
    /// directory, the working directory.
    Launch(Launch),
    /// Send this signal to the command's process group.
    Signal(i32),
    /// Go on for so long from now, unless told again: then it is too late, and everything is killed. Until the first
    /// one there is no such time.
    KeepAlive(Duration),
    /// Kill every process.
    Kill,
}

/// The overlays of a session, which init mounts outside of any sandbox. The only message then: it carries the namespaces to
/// add them to, if there are any, and `ready` carries those that they are in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayRequest {
    /// Where their layers are; it is made if it is not there.
    pub directory: PathBuf,
    /// Whose the changes are.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// What is not there yet is added.
    pub overlays: Vec<Overlay>,
}

/// A directory of the host under a layer that takes all changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// On the host.
    pub source: PathBuf,
    /// Of its layer, and of its place below [`OVERLAY_MOUNTS_DIR`].
    pub name: String,
    /// What is left out of it, below its source, without a symbolic link on the way.
    pub hidden: Vec<PathBuf>,
}

/// Where overlays are mounted, in the directory of their layers.
pub const OVERLAY_MOUNTS_DIR: &str = "mounted";

/// What holds for the whole sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// How many entries of control groups come with it.
    pub cgroup_fds: usize,
    /// Limits of each process.
    pub rlimits: Vec<Rlimit>,
    /// Where working directories are opened, as seen inside; `None` if they come with `launch`.
    pub workspace: Option<PathBuf>,
    /// Whether descriptors cannot be passed out: `launch` then comes on the control socket too.
    pub relay_launch: bool,
    /// Whether init stays after `exited` until the socket ends.
    pub stay_after_exit: bool,
    /// What holds the command inside; `None` in mode `logical`.
    pub security: Option<SecuritySetup>,
}

/// What holds a command inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecuritySetup {
    /// What init must find around itself.
    pub expected: ExpectedEnvironment,
    /// The only files that may be executed; `None` for any.
    pub executables: Option<Vec<PathBuf>>,
    /// The filter of system calls, one BPF instruction in each word as it is in memory.
    pub filter: Vec<u64>,
    /// Whether it notifies: then its listener comes with `ready`.
    pub notify: bool,
}

/// What must be around init before it goes on. It must be process 1 of its namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedEnvironment {
    /// The host's namespaces, by their name in `/proc/self/ns`: ours must be others.
    pub host_namespaces: BTreeMap<String, u64>,
    /// What must be mounted.
    pub mounts: Vec<ExpectedMount>,
    /// The host name.
    pub hostname: Option<String>,
    /// User and group.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A mount that must be there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedMount {
    /// The mount point.
    pub target: PathBuf,
    /// Whether it can be written to; `None` if that does not matter.
    pub writable: Option<bool>,
}

/// The command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Program and arguments; a program without a slash is looked up in the PATH of `env`.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// The working directory below the workspace of the set-up; `None` if its descriptor comes.
    pub directory: Option<String>,
    /// Whether stdin is a terminal that becomes the controlling one.
    pub terminal: bool,
}

/// A limit of each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    /// Of what.
    pub resource: Resource,
    /// The most.
    pub max: u64,
}

/// What init says to its backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// Every restriction is in place; the command's process waits. Carries the launch socket and,
    /// if there is a filter, its listener.
    Ready,
    /// The command was executed; said only where init relayed its launch.
    Launched,
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
    /// Be process 1.
    CheckProcessId,
    /// Be in namespaces of its own.
    CheckNamespaces,
    /// Find what must be mounted, as it must be.
    CheckMounts,
    /// Have the host name.
    CheckHostname,
    /// Have the ids.
    CheckIds,
    /// Give up for good what makes a user privileged.
    LockSecureBits,
    /// Give up for good every capability.
    DropBoundingSet,
    /// Give up the capabilities that survive an exec.
    ClearAmbientSet,
    /// Give up those of this process.
    DropCapabilities,
    /// Gain nothing by an exec.
    NoNewPrivileges,
    /// Make the launch socket.
    LaunchSocket,
    /// Start the command's process.
    Fork,
    /// Have it killed when init ends.
    DieWithInit,
    /// Begin a session for it.
    NewSession,
    /// Limit it.
    Rlimits,
    /// Open the workspace.
    Workspace,
    /// Restrict what it may execute.
    RestrictExecution,
    /// Keep every descriptor but the streams from it.
    KeepDescriptors,
    /// Unblock signals.
    UnblockSignals,
    /// Filter its system calls.
    Filter,
    /// Put arguments and environment together.
    Arguments,
    /// Go to its working directory.
    WorkingDirectory,
    /// Put its streams in place.
    Streams,
    /// Give it its terminal.
    TakeTerminal,
    /// Execute it.
    Execute,
    /// Watch over it.
    Supervise,
    /// Hear in time that it may go on.
    KeepAlive,
    /// Have mounts that nobody else sees.
    OverlaySpace,
    /// Make the directories of a layer.
    OverlayLayer,
    /// Leave secrets out of an overlay.
    OverlayHide,
    /// Have what root owns belong to the session's user.
    OverlayOwner,
    /// Mount an overlay.
    OverlayMount,
}

/// How everything ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// How the command ended.
    pub status: ExitStatus,
    /// User and system time of the processes that were waited for.
    pub cpu_time: Duration,
    /// The largest resident memory of one process.
    pub peak_memory_bytes: u64,
    /// Bytes that they read from devices.
    pub read_bytes: u64,
    /// Bytes that they wrote to files.
    pub written_bytes: u64,
}
