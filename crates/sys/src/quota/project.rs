//! Project ids of files, and whether new files in a directory inherit its id.

use std::os::fd::{AsFd, AsRawFd};

use nix::libc;
use rustix::io::Errno;

use crate::call::check;

/// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`, which `libc` lacks.
const GET: u32 = 0x801c_581f;
const SET: u32 = 0x401c_5820;
/// `FS_XFLAG_PROJINHERIT`.
const INHERIT: u32 = 0x200;

/// `struct fsxattr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    cow_extent_size: u32,
    pad: [u8; 8],
}

/// The project of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Project {
    /// Zero if it has none.
    pub id: u32,
    /// Whether new entries get the same project and, if they are directories, this flag.
    pub is_inherited: bool,
}

/// The project of an open directory.
///
/// # Errors
/// As `ioctl(2)`: `ENOTTY` or `EOPNOTSUPP` if the file system has no projects.
pub fn project_of(directory: impl AsFd) -> Result<Project, Errno> {
    let attributes = get(&directory)?;
    Ok(Project { id: attributes.project, is_inherited: attributes.flags & INHERIT != 0 })
}

/// Puts an open directory into a project, which everything inherits that is created in it from now
/// on. What exists there keeps its project.
///
/// # Errors
/// As `ioctl(2)`: `EPERM` for a directory of another user without `CAP_FOWNER`, `EINVAL` outside of
/// the initial user namespace, `EOPNOTSUPP` if the file system has no projects.
pub fn set_project(directory: impl AsFd, id: u32) -> Result<(), Errno> {
    let mut attributes = get(&directory)?;
    attributes.project = id;
    attributes.flags |= INHERIT;
    // SAFETY: the descriptor is open, and the kernel reads a `struct fsxattr`.
    check(unsafe {
        libc::ioctl(directory.as_fd().as_raw_fd(), SET as libc::Ioctl, &raw const attributes)
    })
}

fn get(directory: &impl AsFd) -> Result<Attributes, Errno> {
    let mut attributes = Attributes::default();
    // SAFETY: the descriptor is open, and the kernel writes a `struct fsxattr`.
    check(unsafe {
        libc::ioctl(directory.as_fd().as_raw_fd(), GET as libc::Ioctl, &raw mut attributes)
    })?;
    Ok(attributes)
}
