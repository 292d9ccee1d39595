//! The messages to `codelia-init --zygote`, which holds what the sandboxes of a session share.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Setup;

/// A message to `codelia-init --zygote`: first `create`, then any number of `start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZygoteRequest {
    /// Make the zygote. The answer is `ready`.
    Create(Box<Zygote>),
    /// Start a sandbox out of the zygote. Carries its control socket. The answer is `started` or
    /// `failed`.
    Start(StartRequest),
}

/// How to start a sandbox out of a zygote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartRequest {
    /// Whether the directory of a cgroup comes after the control socket, to start the sandbox in if
    /// that is allowed.
    pub has_group: bool,
    /// How many descriptors for joining cgroups come last, for a sandbox that did not start in its
    /// own.
    pub cgroup_fds: usize,
    /// Whether another sandbox of the zygote has found its mounts as expected. This one makes the
    /// same.
    pub are_mounts_checked: bool,
}

/// The common part of a session's sandboxes: user, mount, UTS and network namespaces. A
/// process with the session's user holds them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Zygote {
    /// The host name.
    pub hostname: Option<String>,
    /// The user inside. Outside it is the user of this process.
    pub uid: u32,
    /// The group inside.
    pub gid: u32,
    /// Whether its sandboxes have networks of their own, with loopback.
    pub has_networks: bool,
    /// The mounts that all sandboxes share, in order.
    pub mounts: Vec<ZygoteMount>,
    /// The mounts that each sandbox makes on top of them, in order.
    pub own_mounts: Vec<OwnMount>,
    /// The setup of each sandbox. Its cgroups come when it starts.
    pub setup: Setup,
}

/// A mount or file of a zygote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZygoteMount {
    /// A directory or file of the host, with the mounts below it.
    Bind {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whether it is writable.
        writable: bool,
    },
    /// A directory of the host's runtime, read-only, with inodes that only the sandboxes of this
    /// zygote share.
    Runtime {
        /// On the host and inside.
        path: PathBuf,
    },
    /// A copy of a file of the host.
    Copy {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
    },
    /// A file with this text.
    File {
        /// Inside.
        target: PathBuf,
        /// The text.
        text: String,
    },
    /// A symbolic link.
    Symlink {
        /// Path of the link, inside.
        target: PathBuf,
        /// The target of the link.
        to: PathBuf,
    },
    /// A minimal `/dev`, with these devices of the host.
    Dev {
        /// Their names.
        devices: Vec<String>,
    },
}

/// A mount that each sandbox of a zygote makes for itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnMount {
    /// `/proc` of its PID namespace.
    Proc,
    /// `/dev/pts`.
    Terminals {
        /// How many terminals can be open.
        max: u32,
    },
    /// A tmpfs.
    Tmpfs {
        /// Inside.
        target: PathBuf,
        /// Size in bytes.
        size_bytes: u64,
    },
    /// A mount that the zygote made elsewhere, because it belongs above or below one of these.
    Staged {
        /// Where the zygote made it.
        staged: PathBuf,
        /// Where it belongs.
        target: PathBuf,
    },
    /// A symbolic link.
    Symlink {
        /// Path of the link, inside.
        target: PathBuf,
        /// The target of the link.
        to: PathBuf,
    },
}

/// The directory inside a sandbox with mounts that are moved elsewhere or must only exist. It is
/// masked before a command starts.
pub const STAGING_DIR: &str = "/.codelia-mounts";

/// The host's `/proc` in a zygote. The kernel mounts a new one only where one is visible.
pub const HOST_PROC: &str = "/.codelia-mounts/proc";

/// Where the sandboxes of a zygote find what covers masked paths.
pub const ZYGOTE_FILES: &str = "/.codelia-mounts/files";
