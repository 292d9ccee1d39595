//! The steps of `codelia-init` that can fail.

use std::fmt;

use codelia_sys::Errno;
use serde::{Deserialize, Serialize};

/// A failed step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The step.
    pub step: Step,
    /// The kernel's error.
    pub errno: i32,
}

impl Failure {
    /// A step failed with this errno.
    #[must_use]
    pub const fn new(step: Step, errno: Errno) -> Self {
        Self { step, errno: errno.raw_os_error() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {:?}: {}", self.step, Errno::from_raw_os_error(self.errno))
    }
}

/// The steps that can fail, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Check that there is one thread and close all descriptors but the control socket.
    ClaimSingleThread,
    /// Send, receive or decode a message.
    Protocol,
    /// Redirect init's own output to `/dev/null`.
    RedirectOutput,
    /// Leave the terminal and the process group of the backend.
    LeaveSession,
    /// Protect init's memory from other processes.
    SetNotDumpable,
    /// Become the parent of orphaned descendants.
    BecomeSubreaper,
    /// Check that descendants can be listed, in order to kill them.
    ListDescendants,
    /// Block signals and open the descriptor for children's exits.
    BlockSignals,
    /// Join the cgroups.
    JoinCgroups,
    /// Create or enter the network namespace.
    EnterNetwork,
    /// Set up the loopback interface of the network namespace and its routes.
    ConfigureNetwork,
    /// Open the sockets for the proxy outside.
    OpenEgressSockets,
    /// Create the mount and cgroup namespaces of the view.
    UnshareView,
    /// Give the runtime's files inodes of their own.
    PrivateRuntime,
    /// Make a part of `/proc` read-only, or hide a path.
    MaskPaths,
    /// Make the workspace or parts of it read-only or not executable.
    LayOutWorkspace,
    /// Check that init is PID 1.
    CheckPid,
    /// Check that the namespaces are not the host's.
    CheckNamespaces,
    /// Check the mounts: exactly those of the plan.
    CheckMounts,
    /// Check the host name.
    CheckHostname,
    /// Check user and group.
    CheckIds,
    /// Lock the secure bits.
    LockSecureBits,
    /// Empty the capability bounding set.
    DropBoundingSet,
    /// Empty the ambient capability set.
    ClearAmbientSet,
    /// Drop the capabilities of this process.
    DropCapabilities,
    /// Set `no_new_privs`.
    SetNoNewPrivs,
    /// Check that no capability is left and none can be gained.
    CheckPrivileges,
    /// Create the launch socket.
    CreateLaunchSocket,
    /// Start the command's process.
    Fork,
    /// Have the command's process killed when init ends.
    DieWithInit,
    /// Start a session for the command.
    NewSession,
    /// Set resource limits.
    SetRlimits,
    /// Open the workspace.
    OpenWorkspace,
    /// Keep all descriptors but stdin, stdout and stderr from the command.
    HideDescriptors,
    /// Unblock signals.
    UnblockSignals,
    /// Restrict which files may be executed.
    RestrictExecution,
    /// Restrict which files may be read.
    RestrictReading,
    /// Keep the command from abstract sockets of the host.
    ScopeSockets,
    /// Install the seccomp filter.
    InstallFilter,
    /// Check the privileges and the filter of the command's process.
    CheckCommand,
    /// Install the seccomp filter of init itself.
    InstallInitFilter,
    /// Build arguments and environment.
    BuildArguments,
    /// Change to the working directory.
    WorkingDirectory,
    /// Open a terminal in the sandbox's own `/dev/pts`.
    OpenTerminal,
    /// Replace stdin, stdout and stderr.
    ReplaceStdio,
    /// Set the controlling terminal.
    SetTerminal,
    /// Execute the command.
    Execute,
    /// Supervise the command.
    Supervise,
    /// Receive `keep_alive` before the deadline.
    KeepAlive,
    /// Create or enter the namespaces of overlays.
    OverlayNamespaces,
    /// Create the directories of an overlay's layers.
    OverlayLayers,
    /// Hide paths in an overlay.
    OverlayHide,
    /// Map files of root to the session's user.
    OverlayIdmap,
    /// Mount an overlay.
    OverlayMount,
    /// Set `nosuid` and `nodev` on the mounts of a container.
    RestrictMounts,
    /// Create the namespaces of a zygote.
    ZygoteNamespaces,
    /// Create the mounts of a zygote.
    ZygoteMounts,
    /// Create or enter a network of a zygote.
    ZygoteNetwork,
    /// Start a sandbox out of a zygote.
    StartSandbox,
    /// Map the ids of a sandbox, and have it end with its zygote.
    JoinZygote,
    /// Create the mounts that a sandbox of a zygote has for itself.
    OwnMounts,
}
