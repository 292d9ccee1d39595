//! The steps of a run.

/// A step of a run whose latency is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Authenticate, validate, build the run specification.
    Admit,
    /// Insert the run into the store.
    Record,
    /// Push the run to the lease holder.
    Dispatch,
    /// Wait for a slot.
    Queue,
    /// Create a sandbox, if none was prepared.
    Prepare,
    /// From the launch request to the command's `execve`.
    Setup,
    /// Execute the command.
    Execute,
    /// Commit the outcome.
    Commit,
}

impl Step {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Record => "record",
            Self::Dispatch => "dispatch",
            Self::Queue => "queue",
            Self::Prepare => "prepare",
            Self::Setup => "setup",
            Self::Execute => "execute",
            Self::Commit => "commit",
        }
    }
}
