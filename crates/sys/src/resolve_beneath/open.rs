//! The calls that open a path, and where they may resolve it to.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags},
    io::Errno,
};

/// Never out of the root, and never through the magic links of `/proc`.
pub(super) const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

/// Like [`BENEATH`], and never onto another mount.
pub(super) const BENEATH_ON_ONE_MOUNT: ResolveFlags = BENEATH.union(ResolveFlags::NO_XDEV);

/// Opens one path component without following it and without touching the file.
pub(super) const COMPONENT: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub(super) fn openat2(
    dir: impl AsFd,
    path: &Path,
    flags: OFlags,
    mode: Mode,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let dir = dir.as_fd();
    retry(|| rustix::fs::openat2(dir, path, flags, mode, resolve))
}

/// Repeats a call while it is interrupted. `openat2` fails with `EAGAIN` when a concurrent rename
/// keeps the kernel from deciding whether the path stays beneath the root.
pub(super) fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return result,
        }
    }
}
