//! Errors of backends.
//!
//! Messages contain their cause and have no `source`: they reach users as a single line
//! (`codelia doctor`, refusals) and must not be printed twice where a chain is printed.

use std::{io, path::PathBuf};

use codelia_init::{Failure, FrameError, Step};
use codelia_sys::Errno;
use codelia_types::{Mode, Reason, Refusal};
use libseccomp::error::SeccompError;

/// A sandbox could not be prepared or launched, or leftovers could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command cannot be executed. The caller can fix it.
    #[error("{}: {}", .0.reason, .0.message)]
    Refused(Refusal),
    /// The plan asks for something that this mode or host cannot enforce.
    #[error("this mode cannot enforce {field} on this host")]
    Unenforceable {
        /// The field of the plan.
        field: &'static str,
    },
    /// A system call on the host failed.
    #[error(transparent)]
    System(#[from] codelia_sys::Error),
    /// The session's directory cannot be opened.
    #[error("cannot open the session directory {}: {errno}", path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
    /// `codelia-init` does not exist.
    #[error("codelia-init not found at {}; set CODELIA_INIT to its path", path.display())]
    InitMissing {
        /// The path that was tried.
        path: PathBuf,
    },
    /// `codelia-init` cannot be started.
    #[error("cannot start codelia-init at {}: {cause}", path.display())]
    InitStart {
        /// The path that was executed.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The seccomp filter cannot be built.
    #[error("cannot build the seccomp filter: {0}")]
    Filter(SeccompError),
    /// The tool of a mode does not exist.
    #[error("{} not found", path.display())]
    ToolMissing {
        /// The path that was tried.
        path: PathBuf,
    },
    /// The tool of a mode cannot be started.
    #[error("cannot start {}: {cause}", path.display())]
    ToolStart {
        /// The path that was executed.
        path: PathBuf,
        /// Why.
        cause: io::Error,
    },
    /// The tool of a mode could not create the sandbox.
    #[error("{mode} failed: {message}")]
    Tool {
        /// The mode.
        mode: Mode,
        /// The tool's own message.
        message: String,
    },
    /// The container engine cannot be reached.
    #[error("no container engine responds at {}: {message}", socket.display())]
    EngineMissing {
        /// The socket of the engine.
        socket: PathBuf,
        /// Why.
        message: String,
    },
    /// A request to the container engine failed.
    #[error("container engine: cannot {step}: {message}")]
    Engine {
        /// The step that was requested.
        step: &'static str,
        /// The engine's own message.
        message: String,
    },
    /// A process outside the container connected to the control socket.
    #[error("a process outside the container connected to the control socket")]
    UnknownPeer,
    /// The plan is for a runtime with its own kernel, but the runtime uses the host's.
    #[error("the container runtime shares the host's kernel, the plan needs one with its own")]
    SharedKernel,
    /// No process of the sandbox is in its control group, so that no limit would hold.
    #[error("the sandbox is not in its control group")]
    OutsideGroup,
    /// A step inside the sandbox failed.
    #[error("codelia-init failed: {0}")]
    InitFailed(Failure),
    /// An overlay cannot be mounted.
    #[error("cannot mount an overlay: {0}")]
    Overlay(Failure),
    /// The leftovers of killed workers cannot be listed or removed.
    #[error("cannot remove the leftovers of killed workers: {0}")]
    Upkeep(io::Error),
    /// The control socket failed.
    #[error("control socket: {0}")]
    Control(io::Error),
    /// A message on the control socket cannot be encoded or decoded.
    #[error("control protocol: {0}")]
    Frame(FrameError),
    /// `codelia-init` sent a message that was not expected at this point.
    #[error("codelia-init sent an unexpected message")]
    UnexpectedMessage,
    /// `codelia-init` exited without reporting why.
    #[error("codelia-init exited unexpectedly")]
    InitExited,
    /// `codelia-init` did not respond in time.
    #[error("codelia-init did not respond in time")]
    InitTimeout,
}

impl Error {
    pub(crate) fn refused(reason: Reason, message: impl Into<String>) -> Self {
        Self::Refused(Refusal { reason, message: message.into() })
    }

    /// The meaning of a failed launch to the caller.
    pub(crate) fn launch(failure: Failure, program: &str) -> Self {
        match (failure.step, Errno::from_raw_os_error(failure.errno)) {
            (Step::Execute, Errno::NOENT | Errno::NOTDIR) => Self::refused(
                Reason::ExecutableNotFound,
                format!("executable {program:?} not found"),
            ),
            (Step::Execute, Errno::ACCESS | Errno::PERM | Errno::ISDIR) => Self::refused(
                Reason::ExecutableNotPermitted,
                format!("{program:?} is not executable, or the policy does not allow it"),
            ),
            (Step::Execute, Errno::NOEXEC) => Self::refused(
                Reason::ExecutableNotPermitted,
                format!(
                    "{program:?} is not a program for this machine; a script needs a `#!` line"
                ),
            ),
            (Step::OpenTerminal, errno) => Self::refused(
                Reason::LaunchFailed,
                format!("cannot open a terminal in the sandbox: {errno}; run it without one"),
            ),
            (Step::WorkingDirectory, errno) => Self::working_directory(errno),
            _ => Self::refused(Reason::LaunchFailed, failure.to_string()),
        }
    }

    pub(crate) fn working_directory(errno: Errno) -> Self {
        let message = match errno {
            Errno::XDEV => "the working directory is outside the session's root".to_owned(),
            Errno::NOENT => "the working directory does not exist".to_owned(),
            errno => format!("cannot enter the working directory: {errno}"),
        };
        Self::refused(Reason::WorkingDirectoryInvalid, message)
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Control(error)
    }
}

impl From<FrameError> for Error {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl From<SeccompError> for Error {
    fn from(error: SeccompError) -> Self {
        Self::Filter(error)
    }
}
