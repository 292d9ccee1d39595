//! Why a path could not be resolved.

use rustix::io::Errno;

/// A path could not be resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The path leaves the root.
    #[error("the path leaves the root directory")]
    OutsideRoot,
    /// The kernel refused a step.
    #[error(transparent)]
    Os(#[from] Errno),
}
