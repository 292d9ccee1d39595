//! Directories that are opened without leaving a root.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path},
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
            Err(Errno::NOSYS) => return walk_beneath(root, Path::new(path)),
            answer => return answer,
        }
    }
}

/// The same where the kernel has no such call: one step after another, and no symlink at all.
fn walk_beneath(root: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = DIRECTORY.union(OFlags::NOFOLLOW);
    let mut directory = rustix::fs::openat(root, ".", flags, Mode::empty())?;
    for step in path.components() {
        match step {
            Component::CurDir => {}
            Component::Normal(name) => {
                directory = rustix::fs::openat(&directory, name, flags, Mode::empty())?
            }
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV),
        }
    }
    Ok(directory)
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
        let walk = |path: &str| walk_beneath(&root, Path::new(path));
        assert!(walk(".").is_ok() && walk("a/b").is_ok());
        assert_eq!(walk("absent").unwrap_err(), Errno::NOENT);
        for outside in ["..", "a/..", "/", "out", "out/tmp", "in"] {
            assert!(walk(outside).is_err(), "{outside}");
        }
    }
}
