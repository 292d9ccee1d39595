//! A small tmpfs that can be filled and freed. Needs root; without it, nothing is mounted or
//! filled.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, ensure};

use crate::{available, is_root};

/// Enough for the marks and uploads of thousands of runs.
pub(crate) const WORKER_DISK: &str = "size=16m,mode=0755";
/// Enough for the data of Postgres and its WAL.
pub(crate) const DATABASE_DISK: &str = "size=400m,mode=0755";
const FILLER: &str = "filler";

#[derive(Debug)]
pub(crate) struct Disk {
    path: PathBuf,
    is_mounted: bool,
}

impl Disk {
    pub(crate) fn mount(path: &Path, options: &str) -> Result<Self> {
        fs::create_dir_all(path)?;
        let is_mounted = available("root", (!is_root()).then_some("only root can mount a tmpfs"));
        if is_mounted {
            let status = Command::new("mount")
                .args(["-t", "tmpfs", "-o", options, "tmpfs"])
                .arg(path)
                .status()?;
            ensure!(status.success(), "mount: {status}");
        }
        Ok(Self { path: path.to_owned(), is_mounted })
    }

    /// Fills all free space.
    pub(crate) fn fill(&self) -> Result<()> {
        if !self.is_mounted {
            return Ok(());
        }
        let mut filler = File::create(self.path.join(FILLER))?;
        for size in [1 << 20, 4096, 256, 1] {
            let block = vec![0; size];
            while filler.write_all(&block).is_ok() {}
        }
        Ok(())
    }

    pub(crate) fn free(&self) -> Result<()> {
        let filler = self.path.join(FILLER);
        if self.is_mounted && filler.exists() {
            fs::remove_file(filler)?;
        }
        Ok(())
    }

    pub(crate) fn unmount(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_mounted) {
            let status = Command::new("umount").arg(&self.path).status()?;
            ensure!(status.success(), "umount: {status}");
        }
        Ok(())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_mounted {
            let lazy = Command::new("umount").arg("-l").arg(&self.path).status();
            eprintln!("unmounted a leftover tmpfs: {lazy:?}");
        }
    }
}
