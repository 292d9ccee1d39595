//! Mechanisms of the kernel that limit sessions.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

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

    /// Whether it can set the lower limits of a run. If not, runs with some are watched.
    fn limits_runs(&self) -> bool {
        true
    }

    /// The usage of a session. Must be cheap: it is called about once a second for each session
    /// with a run.
    fn usage(&self, target: &Target) -> io::Result<DiskUsage>;

    /// The worker gives the session up. Its limits stay, since its files do. Does not block.
    fn forget(&self, _target: &Target) {}

    /// The worker has just taken a session; nothing has used its directory, which may be absent.
    fn open(&self, _session: SessionId, _directory: &Path, _limits: DiskLimits) -> io::Result<()> {
        Ok(())
    }

    /// The directories of a session exist and have their owner: its own one, and those in it that
    /// are created with it. Nothing else is in them if the session is new.
    fn adopt(&self, _directory: &Path, _inner: &[PathBuf], _ids: Ids) -> io::Result<()> {
        Ok(())
    }

    /// A session is about to be removed; nothing uses its files. Returns the bytes that this freed.
    /// After a failure, the same call continues.
    fn remove(&self, _session: SessionId, _directory: &Path) -> io::Result<u64> {
        Ok(0)
    }

    /// Frees what sessions had that were forgotten since the last call, or with `all` what any
    /// session has: the worker stops.
    fn close(&self, _all: bool) {}

    /// All files of a session are removed, and its user has no session any more.
    fn release(&self, _uid: u32) -> io::Result<()> {
        Ok(())
    }
}
