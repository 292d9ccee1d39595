//! Flags of mounts that exist already.

use std::{ffi::CString, os::unix::ffi::OsStrExt, path::Path};

use nix::libc;
use rustix::io::Errno;

use crate::fd::last_errno;

/// Sets `nosuid` on the mount at `path` and on every mount below it.
///
/// # Errors
/// As `mount_setattr(2)`, which needs Linux 5.12.
pub fn deny_setuid(path: &Path) -> Result<(), Errno> {
    set(path, libc::MOUNT_ATTR_NOSUID, libc::AT_RECURSIVE)
}

/// Sets `nodev` on the mount at `path` alone.
///
/// # Errors
/// As `mount_setattr(2)`: `EINVAL` if nothing is mounted there.
pub fn deny_devices(path: &Path) -> Result<(), Errno> {
    set(path, libc::MOUNT_ATTR_NODEV, 0)
}

fn set(path: &Path, flag: u64, flags: libc::c_int) -> Result<(), Errno> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)?;
    let attributes = libc::mount_attr { attr_set: flag, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the path is NUL-terminated, and the size is that of the attributes, which the kernel
    // only reads.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags | libc::AT_SYMLINK_NOFOLLOW,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}
