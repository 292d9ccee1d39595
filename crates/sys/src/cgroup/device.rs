//! I/O rate limits of a cgroup on a block device.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{major, minor},
    io::Errno,
};

use super::{
    controller::{Controller, Version},
    group::Group,
    hierarchy::Hierarchy,
};
use crate::Error;

/// A whole disk, by device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    major: u32,
    minor: u32,
}

/// Limits per second. `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The device.
    pub device: Device,
    /// Bytes read.
    pub read_bytes: Option<u64>,
    /// Bytes written.
    pub write_bytes: Option<u64>,
    /// Read operations.
    pub reads: Option<u64>,
    /// Write operations.
    pub writes: Option<u64>,
}

impl Device {
    /// The disk that holds a file.
    ///
    /// # Errors
    /// `ENODEV` if the file system is not on a single disk.
    pub fn with_file(path: &Path) -> Result<Self, Error> {
        let stat = rustix::fs::stat(path).map_err(|errno| Error::new("stat", path, errno))?;
        let device = format!("/sys/dev/block/{}:{}", major(stat.st_dev), minor(stat.st_dev));
        // Limits apply to the disk, not to a partition of it.
        let device = PathBuf::from(device);
        let disk = if device.join("partition").exists() { device.join("..") } else { device };
        let no_disk = || Error::new("find the disk of", path, Errno::NODEV);
        let text = fs::read_to_string(disk.join("dev")).map_err(|_| no_disk())?;
        let (major, minor) = text.trim().split_once(':').ok_or_else(no_disk)?;
        let number = |text: &str| text.parse().map_err(|_| no_disk());
        Ok(Self { major: number(major)?, minor: number(minor)? })
    }
}

impl Hierarchy {
    /// Whether write limits take effect. Version 1 does not attribute writeback to a cgroup.
    #[must_use]
    pub fn limits_writes(&self) -> bool {
        self.parent(Controller::Io).is_ok_and(|parent| parent.version == Version::V2)
    }
}

impl Group {
    /// Sets I/O limits. With `None` it only checks that they could be set.
    ///
    /// # Errors
    /// The limits cannot be set.
    pub fn limit_device(
        &mut self,
        hierarchy: &Hierarchy,
        limits: Option<DeviceLimits>,
    ) -> Result<(), Error> {
        let group = self.add_controller(hierarchy, Controller::Io)?;
        let Some(limits) = limits else { return Ok(()) };
        let Device { major, minor } = limits.device;
        let rates = [
            ("blkio.throttle.read_bps_device", "rbps", limits.read_bytes),
            ("blkio.throttle.write_bps_device", "wbps", limits.write_bytes),
            ("blkio.throttle.read_iops_device", "riops", limits.reads),
            ("blkio.throttle.write_iops_device", "wiops", limits.writes),
        ];
        for (file_v1, key_v2, rate) in rates {
            match (rate, group.version) {
                (None, _) => {}
                (Some(rate), Version::V1) => {
                    group.write(file_v1, format!("{major}:{minor} {rate}"))?
                }
                (Some(rate), Version::V2) => {
                    group.write("io.max", format!("{major}:{minor} {key_v2}={rate}"))?
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
    fn proc_is_on_no_disk() {
        assert_eq!(Device::with_file(Path::new("/proc/self")).unwrap_err().errno, Errno::NODEV);
    }
}
