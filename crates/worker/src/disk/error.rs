//! Why a session may not write more.

use codelia_policy::Limit;

/// A session has no room for what a call wants to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session uses {used} of {max} ({limit})")]
pub(crate) struct DiskFull {
    /// The limit that would be exceeded: disk bytes or inodes.
    pub(crate) limit: Limit,
    /// Usage of the session, with what open calls have reserved.
    pub(crate) used: u64,
    pub(crate) max: u64,
}

/// Why a call may not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoRoom {
    #[error(transparent)]
    Full(#[from] DiskFull),
    /// The session was not measured yet.
    #[error("the session was not measured yet")]
    NotMeasured,
}
