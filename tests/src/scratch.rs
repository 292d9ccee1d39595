//! A temporary directory for one test.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// A temporary directory that is removed on drop. Other users may traverse it: if the test is root,
/// Postgres runs as another user.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Creates a directory with a path short enough for Unix sockets.
    pub fn new() -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("codelia-test-")
            .tempdir()
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
