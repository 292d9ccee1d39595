//! How fast a group may use a device.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{major, minor},
    io::Errno,
};

use super::{Controller, Group, Hierarchy, Version};
use crate::Error;

/// A whole disk, by the kernel's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    major: u32,
    minor: u32,
}

/// The most in a second. `None` is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Of which device.
    pub device: Device,
    /// Bytes read.
    pub read_bytes: Option<u64>,
    /// Bytes written.
    pub write_bytes: Option<u64>,
    /// Reads.
    pub reads: Option<u64>,
    /// Writes.
    pub writes: Option<u64>,
}

impl Device {
    /// The disk that a file is on.
    ///
    /// # Errors
    /// `ENODEV` for a file system that is not on one disk.
    pub fn of(path: &Path) -> Result<Self, Error> {
        let found = rustix::fs::stat(path).map_err(|errno| Error::new("look at", path, errno))?;
        let own = format!("/sys/dev/block/{}:{}", major(found.st_dev), minor(found.st_dev));
        // The limits are those of the disk, not of a part of it.
        let own = PathBuf::from(own);
        let disk = if own.join("partition").exists() { own.join("..") } else { own };
        let absent = || Error::new("find the disk of", path, Errno::NODEV);
        let text = fs::read_to_string(disk.join("dev")).map_err(|_| absent())?;
        let (major, minor) = text.trim().split_once(':').ok_or_else(absent)?;
        let number = |text: &str| text.parse().map_err(|_| absent());
        Ok(Self { major: number(major)?, minor: number(minor)? })
    }
}

impl Hierarchy {
    /// Whether groups are held to limits of writing. In version 1 what is written goes to the disk later, on nobody's
    /// account.
    #[must_use]
    pub fn limits_writes(&self) -> bool {
        self.base(Controller::Io).is_ok_and(|base| base.version == Version::Two)
    }
}

impl Group {
    /// Holds it to these, or with none makes sure that it could be.
    ///
    /// # Errors
    /// They cannot be set.
    pub fn limit_device(&mut self, hierarchy: &Hierarchy, limits: Option<DeviceLimits>) -> Result<(), Error> {
        let leaf = self.add_later(hierarchy, Controller::Io)?;
        let Some(limits) = limits else { return Ok(()) };
        let Device { major, minor } = limits.device;
        let rates = [
            ("blkio.throttle.read_bps_device", "rbps", limits.read_bytes),
            ("blkio.throttle.write_bps_device", "wbps", limits.write_bytes),
            ("blkio.throttle.read_iops_device", "riops", limits.reads),
            ("blkio.throttle.write_iops_device", "wiops", limits.writes),
        ];
        for (file, key, rate) in rates {
            match (rate, leaf.version) {
                (None, _) => {}
                (Some(rate), Version::One) => leaf.write(file, format!("{major}:{minor} {rate}"))?,
                (Some(rate), Version::Two) => {
                    leaf.write("io.max", format!("{major}:{minor} {key}={rate}"))?
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_memory_is_on_no_disk() {
        assert_eq!(Device::of(Path::new("/proc/self")).unwrap_err().errno, Errno::NODEV);
    }
}
