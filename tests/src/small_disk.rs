//! A small disk that a test can fill.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{available, is_root};

/// A mounted file system. Only root can mount one. Dropping it unmounts it, which also detaches the
/// device of an image.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts 8 MiB in memory. `None` if the test does not run as root.
    pub fn in_memory(path: &Path) -> Result<Option<Self>> {
        Self::mount(path, &["-t", "tmpfs", "-o", "size=8m,mode=0755", "tmpfs"])
    }

    /// Mounts ext4 from an image next to `path`, of which root keeps some percent for itself.
    pub fn ext4(path: &Path, bytes: u64, percent_of_root: u8) -> Result<Option<Self>> {
        let image = path.with_extension("image");
        File::create(&image)?.set_len(bytes)?;
        let reserved = percent_of_root.to_string();
        let made = Command::new("mkfs.ext4").args(["-q", "-m", &reserved]).arg(&image).status();
        ensure!(made.as_ref().is_ok_and(|made| made.success()), "mkfs.ext4: {made:?}");
        Self::mount(path, &["-o", "loop", image.to_str().context("a path in UTF-8")?])
    }

    fn mount(path: &Path, arguments: &[&str]) -> Result<Option<Self>> {
        if !available("root", (!is_root()).then_some("only root can mount a small disk")) {
            return Ok(None);
        }
        fs::create_dir_all(path)?;
        let mounted = Command::new("mount").args(arguments).arg(path).status()?;
        ensure!(mounted.success(), "mount: {mounted}");
        Ok(Some(Self(path.to_owned())))
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let status = Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "cannot unmount the small disk");
    }
}
