//! What a mechanism of the kernel provides.

use std::{fmt, io, path::PathBuf};

use codelia_policy::{DiskLimits, Ids};
use codelia_types::{DiskMechanism, DiskUsage, Mode, SessionId};

/// The files of a session on the host.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) session: SessionId,
    /// Holds the workspace, overlays, imports and transactions.
    pub(crate) directory: PathBuf,
    pub(crate) mode: Mode,
    /// User and group of its processes.
    pub(crate) ids: Ids,
}

/// A mechanism of the kernel that refuses what exceeds the limits of a session. All methods block.
pub(crate) trait Quota: fmt::Debug + Send + Sync {
    fn mechanism(&self) -> DiskMechanism;

    /// Whether it can limit this session. Others are scanned.
    fn covers(&self, target: &Target) -> bool;

    /// Sets the limits of a session. Called when the worker takes it, before its workspace is used,
    /// and when runs with lower limits start and end.
    fn set(&self, target: &Target, limits: DiskLimits) -> io::Result<()>;

    /// What the session uses. Must be cheap: it is called about once a second for each session with a
    /// run.
    fn usage(&self, target: &Target) -> io::Result<DiskUsage>;

    /// The worker gives the session up. Its limits stay, since its files do.
    fn forget(&self, target: &Target);
}
