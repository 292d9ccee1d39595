//! A temporary directory for one test.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// What the server of a whole test run fits into, several times.
const MIN_MEMORY: u64 = 8 << 30;

/// A temporary directory that is removed on drop. Other users may traverse it: if the test is root,
/// Postgres runs as another user.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Creates a directory with a path short enough for Unix sockets.
    pub fn new() -> Result<Self> {
        Self::new_in(&env::temp_dir())
    }

    /// Creates a directory in memory if there is much of it and `TMPDIR` names no other place, else
    /// as [`Scratch::new`]. For a server that creates and removes hundreds of files for each test,
    /// which is slow on a disk.
    pub fn in_memory() -> Result<Self> {
        const MEMORY: &str = "/dev/shm";
        let free = rustix::fs::statvfs(MEMORY).map_or(0, |found| found.f_bavail * found.f_frsize);
        if free < MIN_MEMORY || env::var_os("TMPDIR").is_some() {
            return Self::new();
        }
        Self::new_in(Path::new(MEMORY))
    }

    fn new_in(parent: &Path) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("codelia-test-")
            .tempdir_in(parent)
            .context("create a temporary directory")?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self(dir))
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A path below it.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}
