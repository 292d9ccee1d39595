//! A directory of one test.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use tempfile::TempDir;

/// A directory that is removed with its owner. Other users may pass through it: as root, Postgres
/// runs as one.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// Makes one, in a place short enough for the names of Unix sockets.
    pub fn new() -> Result<Self> {
        let dir =
            tempfile::Builder::new().prefix("codelia-test-").tempdir().context("a temporary directory")?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self(dir))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A path in it.
    #[must_use]
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}
