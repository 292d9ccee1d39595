//! Loop devices: a file as a block device, and file systems on it. A device is freed by the kernel
//! when its last user is gone, so a killed process leaves none behind that nothing uses.

use std::{
    fs::{self, File},
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use nix::{
    libc,
    mount::{MntFlags, MsFlags},
};
use rustix::io::Errno;

use crate::{
    Error,
    call::{check, from_nix, last_errno},
};

const CONTROL: &str = "/dev/loop-control";
/// `LOOP_CTL_GET_FREE`, `LOOP_CONFIGURE`, `LOOP_GET_STATUS64`, which `libc` lacks.
const GET_FREE: u32 = 0x4c82;
const CONFIGURE: u32 = 0x4c0a;
const GET_STATUS: u32 = 0x4c05;
/// `LO_FLAGS_AUTOCLEAR`: the kernel detaches the file when nobody has the device open.
const AUTOCLEAR: u32 = 4;
/// Other processes may take the same free device first.
const MAX_ATTEMPTS: usize = 100;
const NAME_BYTES: usize = 64;

/// `struct loop_info64`.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    numbers: [u64; 3],
    number: u32,
    encryption: [u32; 2],
    flags: u32,
    name: [u8; NAME_BYTES],
    keys: [u8; 96],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const NO_INFO: Info = Info {
    device: 0,
    inode: 0,
    numbers: [0; 3],
    number: 0,
    encryption: [0; 2],
    flags: AUTOCLEAR,
    name: [0; NAME_BYTES],
    keys: [0; 96],
    init: [0; 2],
};

/// A loop device that stays attached at least until this is dropped.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    _device: File,
}

impl LoopDevice {
    /// Attaches a file to a free device. `name` is what `losetup` shows.
    ///
    /// # Errors
    /// The step that failed; `EACCES`, `EPERM` or `ENOENT` where loop devices are not available.
    pub fn attach(image: &File, name: &Path) -> Result<Self, Error> {
        let control = open(Path::new(CONTROL))?;
        let mut config = Config {
            fd: image.as_raw_fd().cast_unsigned(),
            block_size: 0,
            info: NO_INFO,
            reserved: [0; 8],
        };
        let name = name.as_os_str().as_bytes();
        let shown = name.len().min(NAME_BYTES - 1);
        config.info.name[..shown].copy_from_slice(&name[..shown]);
        for _ in 0..MAX_ATTEMPTS {
            let path = free_device(&control)?;
            let device = open(&path)?;
            // SAFETY: the descriptor is open, and the kernel reads a `struct loop_config`.
            let result = unsafe {
                libc::ioctl(device.as_raw_fd(), CONFIGURE as libc::Ioctl, &raw const config)
            };
            match check(result) {
                Ok(()) => return Ok(Self { path, _device: device }),
                Err(Errno::BUSY) => {}
                Err(errno) => return Err(Error::new("attach a file to", path, errno)),
            }
        }
        Err(Error::new("find a free loop device with", CONTROL, Errno::BUSY))
    }

    /// The device that a file is attached to, by this process or by any other.
    ///
    /// # Errors
    /// The list of devices or the file cannot be read.
    pub fn attached_to(image: &File) -> Result<Option<Self>, Error> {
        let list = Path::new("/sys/block");
        let stat =
            rustix::fs::fstat(image).map_err(|errno| Error::new("stat image in", list, errno))?;
        for entry in fs::read_dir(list).map_err(Error::io("list", list))? {
            let name = entry.map_err(Error::io("list", list))?.file_name();
            // Only devices with a file have this directory.
            if !name.as_bytes().starts_with(b"loop") || !list.join(&name).join("loop").exists() {
                continue;
            }
            let path = Path::new("/dev").join(&name);
            let Ok(device) = open(&path) else { continue };
            let mut info = NO_INFO;
            // SAFETY: the descriptor is open, and the kernel writes a `struct loop_info64`.
            let result = unsafe {
                libc::ioctl(device.as_raw_fd(), GET_STATUS as libc::Ioctl, &raw mut info)
            };
            if result == 0 && (info.device, info.inode) == (stat.st_dev, stat.st_ino) {
                return Ok(Some(Self { path, _device: device }));
            }
        }
        Ok(None)
    }

    /// Mounts the ext4 file system on the device, without devices and set-user-ID bits. Removed
    /// files become holes in the image.
    ///
    /// # Errors
    /// As `mount(2)`.
    pub fn mount_ext4(&self, target: &Path) -> Result<(), Error> {
        let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOATIME;
        // Unused inode tables are holes already: nobody has to write zeros there.
        let options = "discard,noinit_itable";
        nix::mount::mount(Some(&*self.path), target, Some("ext4"), flags, Some(options))
            .map_err(|error| Error::new("mount an image on", target, from_nix(error)))
    }
}

/// Unmounts what is on a directory. Does not follow a symbolic link.
///
/// # Errors
/// As `umount2(2)`: `EBUSY` while something there is open, `EINVAL` if nothing is mounted.
pub fn unmount(target: &Path) -> Result<(), Error> {
    nix::mount::umount2(target, MntFlags::UMOUNT_NOFOLLOW)
        .map_err(|error| Error::new("unmount", target, from_nix(error)))
}

fn free_device(control: &File) -> Result<PathBuf, Error> {
    // SAFETY: the descriptor is open, and the command has no argument.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), GET_FREE as libc::Ioctl) };
    if number < 0 {
        return Err(Error::new("find a free loop device with", CONTROL, last_errno()));
    }
    Ok(PathBuf::from(format!("/dev/loop{number}")))
}

fn open(path: &Path) -> Result<File, Error> {
    File::options().read(true).write(true).open(path).map_err(Error::io("open", path))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::require::available;

    fn image(dir: &Path) -> Option<File> {
        let path = dir.join("image");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        file.set_len(16 << 20).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&path).status();
        let missing = if !rustix::process::geteuid().is_root() {
            Some("only root can use loop devices")
        } else if !made.is_ok_and(|status| status.success()) {
            Some("mkfs.ext4 is missing")
        } else if !Path::new(CONTROL).exists() {
            Some("no loop devices")
        } else {
            None
        };
        available("loop", missing).then_some(file)
    }

    #[test]
    fn device_is_freed_with_its_mount() {
        let dir = tempfile::tempdir().unwrap();
        let Some(image) = image(dir.path()) else { return };
        let target = dir.path().join("target");
        fs::create_dir(&target).unwrap();
        let found = LoopDevice::attached_to(&image).unwrap();
        assert!(found.is_none(), "{found:?} of {:?}", image.metadata());
        let device = LoopDevice::attach(&image, Path::new("codelia test")).unwrap();
        device.mount_ext4(&target).unwrap();
        drop(device);
        fs::write(target.join("file"), "kept").unwrap();
        let again = LoopDevice::attached_to(&image).unwrap().expect("the mount keeps it");
        let second = dir.path().join("second");
        fs::create_dir(&second).unwrap();
        again.mount_ext4(&second).unwrap();
        drop(again);
        assert_eq!(
            fs::read_to_string(second.join("file")).unwrap(),
            "kept",
            "both show one file system"
        );
        for path in [&target, &second] {
            unmount(path).unwrap();
        }
        assert_eq!(unmount(&target).unwrap_err().errno, Errno::INVAL);
        assert!(LoopDevice::attached_to(&image).unwrap().is_none());
    }
}
