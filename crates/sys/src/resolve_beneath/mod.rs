//! Path resolution that never leaves a root directory, although the sandbox may change the tree
//! meanwhile. Built on `openat2`.
//!
//! - [`Root::resolve`] walks one component at a time and follows symlinks as the command sees them:
//!   an absolute target below the workspace path inside the sandbox resolves from the root.
//! - [`open_directory_beneath`] lets the kernel resolve the whole path and fails if it leaves the
//!   root.

mod directory;
mod entry;
mod walk;

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, ResolveFlags},
    io::Errno,
};

pub use directory::{
    create_directories_without_symlinks, open_directory, open_directory_across_mounts,
    open_directory_beneath, open_directory_without_symlinks,
};
pub use entry::{Entry, ResolvedPath};
pub use walk::{FinalSymlink, Root};

/// Never out of the root, and never through the magic links of `/proc`.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);

/// Like [`BENEATH`], and never onto another mount.
const BENEATH_ON_ONE_MOUNT: ResolveFlags = BENEATH.union(ResolveFlags::NO_XDEV);

/// Opens one path component without following it and without touching the file.
const COMPONENT: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A path could not be resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The path leaves the root.
    #[error("the path leaves the root directory")]
    OutsideRoot,
    /// The kernel refused a step.
    #[error(transparent)]
    Os(#[from] Errno),
}

/// The path in `/proc` under which this process can open the file behind a descriptor.
#[must_use]
pub fn proc_fd_path(fd: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

fn openat2(
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
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return result,
        }
    }
}

fn from_io(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
