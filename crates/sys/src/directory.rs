//! Directories that are opened without leaving a root.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags},
    io::Errno,
};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens a directory as a root for [`open_beneath`].
///
/// # Errors
/// As `openat(2)`.
pub fn open(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())
}

/// Opens a directory below a root. Neither `..`, nor an absolute path, nor a symlink leads out.
///
/// # Errors
/// `EXDEV` for what leads out, else as `openat2(2)`.
pub fn open_beneath(root: impl AsFd, path: &str) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { "." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    loop {
        // The kernel answers EAGAIN when it cannot tell because of a rename elsewhere.
        match rustix::fs::openat2(root.as_fd(), path, DIRECTORY, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            answer => return answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_inside_is_opened_and_one_that_leads_out_is_not() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(temp.path().join("root/a/b")).unwrap();
        std::os::unix::fs::symlink("/", temp.path().join("root/out")).unwrap();
        std::os::unix::fs::symlink("a/b", temp.path().join("root/in")).unwrap();
        let root = open(&temp.path().join("root")).unwrap();
        for inside in ["", "a", "a/b/..", "in"] {
            assert!(open_beneath(&root, inside).is_ok(), "{inside}");
        }
        for outside in ["..", "a/../..", "/", "out", "out/tmp"] {
            assert_eq!(open_beneath(&root, outside).unwrap_err(), Errno::XDEV, "{outside}");
        }
        assert_eq!(open_beneath(&root, "absent").unwrap_err(), Errno::NOENT);
    }
}
