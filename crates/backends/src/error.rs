//! How a sandbox can fail us.

use std::{io, path::PathBuf};

use codelia_init::{Failure, FrameError, Step};
use codelia_sys::Errno;
use codelia_types::{Mode, Reason, Refusal};

/// A sandbox could not be prepared or launched.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command cannot be executed; the caller's to mend.
    #[error("{}: {}", .0.reason, .0.message)]
    Refused(Refusal),
    /// The plan asks for what this mode or host cannot enforce.
    #[error("mode cannot enforce {field} on this host")]
    Unenforceable {
        /// The field of the plan.
        field: &'static str,
    },
    /// A step of the host's side failed.
    #[error(transparent)]
    Host(#[from] codelia_sys::Error),
    /// The session's directory cannot be opened.
    #[error("open the root {}: {errno}", path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// How the kernel refused.
        errno: Errno,
    },
    /// `codelia-init` is not where it should be.
    #[error("codelia-init is not at {}; set CODELIA_INIT to its path", path.display())]
    InitMissing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// `codelia-init` cannot be started.
    #[error("start {}: {source}", path.display())]
    InitStart {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The filter of system calls cannot be made.
    #[error("filter of system calls: {0}")]
    Filter(#[from] libseccomp::error::SeccompError),
    /// The tool of a mode is not there.
    #[error("{} was not found", path.display())]
    ToolMissing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The tool of a mode cannot be started.
    #[error("start {}: {source}", path.display())]
    ToolStart {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The tool of a mode could not make the sandbox.
    #[error("{mode}: {complaint}")]
    Tool {
        /// The mode.
        mode: Mode,
        /// In its own words.
        complaint: String,
    },
    /// The container engine cannot be spoken to.
    #[error("no container engine answers at {}: {complaint}", socket.display())]
    EngineMissing {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        complaint: String,
    },
    /// The container engine did not do what it was asked.
    #[error("container engine: {step}: {complaint}")]
    Engine {
        /// What it was asked.
        step: &'static str,
        /// In its own words.
        complaint: String,
    },
    /// Who connected to the control socket is not in the container.
    #[error("a stranger connected to the control socket")]
    Stranger,
    /// A plan for a kernel that is not the host's, which is asked for less.
    #[error("the container runtime shares the host's kernel")]
    SharedKernel,
    /// A step inside the sandbox failed.
    #[error("codelia-init failed: {0}")]
    InitFailed(Failure),
    /// An overlay cannot be mounted.
    #[error("overlays of directories of the host: {0}")]
    Overlay(Failure),
    /// What killed workers left cannot be looked for.
    #[error("looking for leftovers: {0}")]
    Sweep(#[source] io::Error),
    /// The control socket failed.
    #[error("control socket: {0}")]
    Control(#[from] io::Error),
    /// `codelia-init` said what it should not, or could not be told something.
    #[error("control protocol: {0}")]
    Frame(#[from] FrameError),
    /// `codelia-init` answered out of turn.
    #[error("codelia-init answered out of turn")]
    OutOfTurn,
    /// `codelia-init` ended without a word.
    #[error("codelia-init ended unexpectedly")]
    InitEnded,
    /// `codelia-init` did not answer in time.
    #[error("codelia-init did not answer in time")]
    Unresponsive,
}

impl Error {
    /// The reason word for a command that cannot be executed.
    pub(crate) fn refused(reason: Reason, message: impl Into<String>) -> Self {
        Self::Refused(Refusal { reason, message: message.into() })
    }

    /// What a failed launch means to the caller.
    pub(crate) fn launch(failure: Failure, program: &str) -> Self {
        match (failure.step, Errno::from_raw_os_error(failure.errno)) {
            (Step::Execute, Errno::NOENT | Errno::NOTDIR) => {
                Self::refused(Reason::ExecutableNotFound, format!("{program:?} was not found"))
            }
            (Step::Execute, Errno::ACCESS | Errno::PERM | Errno::ISDIR) => {
                Self::refused(Reason::ExecutableNotPermitted, format!("{program:?} may not be executed"))
            }
            (Step::WorkingDirectory, errno) => Self::working_directory(errno),
            _ => Self::refused(Reason::LaunchFailed, failure.to_string()),
        }
    }

    pub(crate) fn working_directory(errno: Errno) -> Self {
        let message = match errno {
            Errno::XDEV => "the working directory is outside the session's root".to_owned(),
            Errno::NOENT => "the working directory does not exist".to_owned(),
            errno => format!("the working directory cannot be entered: {errno}"),
        };
        Self::refused(Reason::WorkingDirectoryInvalid, message)
    }
}
