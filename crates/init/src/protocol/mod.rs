//! The messages on the control socket.
//!
//! 1. The backend sends `setup`; init restricts itself, starts the command's process and sends
//!    `ready`. Before that it sends `egress`, if it created the network.
//! 2. The backend sends `launch` on the launch socket, a separate socket to the command's process
//!    that came with `ready`. `terminal` on it carries the controlling side of a terminal, if one
//!    was requested. End of file means that the command was executed; `failed`, that it was not.
//! 3. The backend may send `signal`, `keep_alive` and `kill` at any time.
//! 4. Init sends `exited`. `failed` may replace `ready` or `exited` and is the last message.
//!
//! End of file on the control socket kills every process of the sandbox.
//!
//! Where no descriptor can be passed out of the sandbox, init keeps the launch socket and relays:
//! `launch` comes on the control socket, and `launched` replaces the end of file. Such a command
//! can have no terminal.
//!
//! In mode `native` a zygote's process starts init, on request through a socket of its own
//! ([`ZygoteRequest`]). There is no `setup` on the control socket then: the zygote has it.

mod failure;
mod zygote;

use std::{
    collections::BTreeMap,
    fmt,
    fs::Metadata,
    net::{IpAddr, SocketAddr},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

pub use codelia_sys::process::{ChildrenUsage, ExitStatus, NAMESPACES};
use codelia_sys::{pty::WindowSize, rlimit::Resource};
pub use failure::{Failure, Step};
use serde::{Deserialize, Serialize};
pub use zygote::{
    HOST_PROC, OwnMount, STAGING_DIR, StartRequest, ZYGOTE_FILES, Zygote, ZygoteMount,
    ZygoteRequest,
};

/// A message from a backend to init.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Restrict init and the command's process. Carries descriptors for joining cgroups.
    Setup(Box<Setup>),
    /// Start the command; on the launch socket. Carries stdin, stdout, stderr, unless the command
    /// gets a terminal, and the working directory, unless it names one.
    Launch(Launch),
    /// Send this signal to the command's process group.
    Signal(i32),
    /// Kill everything after this time, unless another `keep_alive` arrives before. Without any
    /// there is no deadline.
    KeepAlive(Duration),
    /// Kill every process.
    Kill,
}

/// A request to mount the overlays of a session, outside any sandbox. The only message to
/// `codelia-init --overlays`. Carries the namespaces to mount in, if they exist; `ready` carries
/// those that were used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverlayRequest {
    /// The directory of the layers, created if missing.
    pub directory: PathBuf,
    /// The user that owns the changes.
    pub uid: u32,
    /// The group that owns the changes.
    pub gid: u32,
    /// The overlays. Those that are mounted already stay.
    pub overlays: Vec<Overlay>,
}

/// A host directory that a session sees in another way than the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The host directory.
    pub source: PathBuf,
    /// The name of its layer and of its mount point in [`OVERLAY_MOUNTS_DIR`].
    pub name: String,
    /// Paths below the source to hide, without symlinks in them.
    pub hidden: Vec<PathBuf>,
    /// The kind of the source, which decides what becomes of changes.
    pub kind: OverlayKind,
}

/// The kinds of sources of an overlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OverlayKind {
    /// A directory of the host, whose files of root belong to the session's user inside. A layer
    /// takes all changes.
    Host,
    /// The session's workspace, and the changes are of one run: the files keep their owners, and
    /// nothing is durable before the worker makes it so.
    Transaction,
    /// A volume, whose files belong to the session's user inside.
    Volume {
        /// Their user and group on the disk. The same as the session's if the worker is not root.
        owner: u32,
        /// Whether changes go to a layer of the session.
        is_copy: bool,
    },
}

/// The directory of the mount points, in the directory of the layers.
pub const OVERLAY_MOUNTS_DIR: &str = "mounted";

/// A request to restrict the mounts of a container from outside. The only message to
/// `codelia-init --restrict-mounts`. Carries the container's mount namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestrictRequest {
    /// The mount points that get `nodev`. Every mount gets `nosuid`.
    pub without_devices: Vec<PathBuf>,
    /// The layout of the workspace; `None` leaves it as it is.
    #[serde(default)]
    pub layout: Option<WorkspaceLayout>,
}

/// The setup of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// How many cgroup descriptors come with the message.
    pub cgroup_fds: usize,
    /// Limits of each process.
    pub rlimits: Vec<Rlimit>,
    /// The root of working directories, as a path inside; `None` if `launch` carries a descriptor.
    pub workspace: Option<PathBuf>,
    /// Whether no descriptor can be passed out, so that `launch` comes on the control socket too.
    pub relay_launch: bool,
    /// Whether init stays after `exited` until end of file.
    pub stay_after_exit: bool,
    /// The restrictions of the command; `None` in mode `logical`.
    pub security: Option<SecuritySetup>,
}

/// The network of a sandbox whose only way out is a proxy outside: loopback, and sockets that the
/// backend gets. Also the only message to `codelia-init --egress`, which carries the network
/// namespace of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// Where the proxy listens.
    pub proxy: SocketAddr,
    /// Where the resolver receives datagrams and listens.
    pub resolver: SocketAddr,
    /// Networks, by address and prefix length, whose addresses are all local.
    pub networks: Vec<(IpAddr, u8)>,
    /// How many stream sockets are made that are not bound.
    pub targets: usize,
}

/// The restrictions of the command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecuritySetup {
    /// The network that init creates, while it holds `CAP_SYS_ADMIN` and `CAP_NET_ADMIN` in its
    /// user namespace; `None` if it has one.
    pub egress: Option<Egress>,
    /// Changes that init makes in the mounts before it checks them; `None` if it may not mount.
    pub view: Option<View>,
    /// The environment that init checks before it continues.
    pub expected: ExpectedEnvironment,
    /// The only files that may be executed; `None` for any.
    pub executables: Option<Vec<PathBuf>>,
    /// The only paths below which files may be read and executed; `None` for any.
    #[serde(default)]
    pub readable: Option<Vec<PathBuf>>,
    /// Whether the network is the host's, so that its abstract sockets must be kept out of reach.
    pub shares_network: bool,
    /// The seccomp filter, one BPF instruction per word in memory layout.
    pub filter: Vec<u64>,
    /// The filter of init itself, installed once the command's process waits.
    pub init_filter: Vec<u64>,
    /// Whether the filter notifies a supervisor. Then `ready` carries its listener.
    pub notify: bool,
}

/// Changes that init makes in the mounts of a sandbox, in a mount and a cgroup namespace of its
/// own, while it holds `CAP_SYS_ADMIN` in its user namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Paths of the host's runtime. Each gets inodes of its own, so that no other sandbox sees its
    /// watches and locks.
    pub private: Vec<PrivatePath>,
    /// The layout of the workspace; `None` leaves it as it is.
    #[serde(default)]
    pub layout: Option<WorkspaceLayout>,
    /// Paths to hide.
    pub masked: Vec<Mask>,
    /// Whether init's mount namespace belongs to its own user namespace already.
    #[serde(default)]
    pub owns_mounts: bool,
}

/// Changes that init makes in the mounts of a workspace. The directories of it exist.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceLayout {
    /// The mount point of the workspace.
    pub workspace: PathBuf,
    /// Whether it stays writable.
    pub writable: bool,
    /// Whether its files stay executable.
    pub executable: bool,
    /// Directories that get a mount of their own, parents first.
    pub directories: Vec<LayoutEntry>,
    /// Other mount points from which nothing can be executed.
    pub not_executable: Vec<PathBuf>,
}

/// A directory of a workspace with a mount of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutEntry {
    /// The path, relative to the workspace.
    pub path: PathBuf,
    /// Whether it is writable.
    pub writable: bool,
    /// Whether its files can be executed.
    pub executable: bool,
}

/// A directory or file of the host's runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrivatePath {
    /// The path, the same on the host.
    pub path: PathBuf,
    /// Which file it must be.
    pub identity: FileIdentity,
    /// The host's mounts below it, which come with it.
    pub host_mounts: Vec<PathBuf>,
    /// Mounts below it, which the tool made elsewhere: under a mount, the kernel allows no view.
    pub below: Vec<StagedMount>,
}

/// A mount that init moves to its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedMount {
    /// Where the tool made it.
    pub staged: PathBuf,
    /// Where it belongs.
    pub target: PathBuf,
    /// Whether it is a read-only file of which init mounts a copy: a tool may have removed the file
    /// from its directory, and the kernel mounts no such file again.
    pub is_copied: bool,
}

/// A path to hide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mask {
    /// The path, without symbolic links.
    pub path: PathBuf,
    /// Whether it is a directory. One that does not exist is created.
    pub is_directory: bool,
}

/// Device and inode of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// The device.
    pub device: u64,
    /// The inode.
    pub inode: u64,
}

/// The environment that init must find. It must also be PID 1 of its namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedEnvironment {
    /// The expectation for each of the [`NAMESPACES`].
    pub namespaces: BTreeMap<String, ExpectedNamespace>,
    /// All mounts, by mount point. Init refuses any other.
    pub mounts: BTreeMap<PathBuf, ExpectedMount>,
    /// The directory whose mounts are not checked, because a mask covers it.
    pub covered: Option<PathBuf>,
    /// Entries that `/proc` may show next to the processes: all others are masked. `None` if the
    /// kernel is not the host's.
    pub shown_in_proc: Option<Vec<String>>,
    /// The host name; `None` for any.
    pub hostname: Option<String>,
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Whether init must lock the secure bits, for which it needs `CAP_SETPCAP`.
    pub locks_secure_bits: bool,
    /// Whether the kernel reports all restrictions of a process in `/proc`.
    pub reports_restrictions: bool,
}

impl From<&Metadata> for FileIdentity {
    fn from(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

impl ExpectedMount {
    /// A read-only mount, of this type if there is one.
    #[must_use]
    pub fn read_only(file_system: Option<&str>) -> Self {
        let file_system = file_system.map(str::to_owned);
        Self { writable: Some(false), file_system, ..Self::default() }
    }
}

impl ExpectedEnvironment {
    /// The expected mount in which another mount point is.
    #[must_use]
    pub fn mount_above(&self, mount_point: &Path) -> Option<&ExpectedMount> {
        mount_point.ancestors().skip(1).find_map(|above| self.mounts.get(above))
    }
}

/// The expectation for a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpectedNamespace {
    /// Not this one, the host's.
    Not(u64),
    /// The mode has none of its own: it may be the host's.
    Shared,
    /// The sandbox has its own kernel, whose numbers mean nothing here.
    OtherKernel,
}

/// A mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedMount {
    /// Whether it may be missing.
    pub is_optional: bool,
    /// Whether it is writable; `None` for either.
    pub writable: Option<bool>,
    /// Whether files on it can be executed; `None` for either.
    #[serde(default)]
    pub executable: Option<bool>,
    /// The type of its file system; `None` for any.
    pub file_system: Option<String>,
    /// Which file is mounted; `None` for any.
    pub identity: Option<FileIdentity>,
    /// Whether the host's mounts below it come with it.
    pub is_recursive: bool,
    /// Whether a link may be in its place. The mount, which must be read-only, is where that leads
    /// to.
    #[serde(default)]
    pub follows_link: bool,
}

/// The command. Its `Debug` output has the names of the variables, not their values.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// Program and arguments. A program without a slash is looked up in the PATH of `env`.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// The working directory below the setup's workspace; `None` if a descriptor comes instead.
    pub directory: Option<String>,
    /// The size of the command's terminal. `None` if its streams come as descriptors.
    pub terminal: Option<WindowSize>,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("argv", &self.argv)
            .field("env", &self.env.keys())
            .finish_non_exhaustive()
    }
}

/// A resource limit of each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    /// The resource.
    pub resource: Resource,
    /// The limit.
    pub max: u64,
}

/// A message from init to its backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The sandbox is started out of a zygote, which sends this. Carries the pidfd of its init.
    Started,
    /// The network is created. Carries its sockets: the listener of the proxy, the UDP socket and
    /// the TCP listener of the resolver, and those that are not bound.
    Egress,
    /// All restrictions are in place and the command's process waits. Carries the launch socket and
    /// the listener of a notifying filter.
    Ready,
    /// The command has its terminal. Carries the side of the terminal emulator.
    Terminal,
    /// The command was executed. Sent only if init relayed the launch.
    Launched,
    /// A step failed. No process is left.
    Failed(Failure),
    /// The command ended, and every other process with it.
    Exited(Exit),
}

/// How the command ended, and what its processes used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// How the command ended.
    pub status: ExitStatus,
    /// The use of reaped processes.
    pub usage: ChildrenUsage,
    /// How often a process tried to reach an address without a route. 0 if the network is not the
    /// sandbox's own.
    pub unreachable_attempts: u64,
}
