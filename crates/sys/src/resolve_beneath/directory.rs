//! Directories opened by the kernel in one call, without leaving a root.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Component, Path},
};

use rustix::{
    fs::{AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Uid},
    io::Errno,
};

use super::open::{BENEATH, BENEATH_ON_ONE_MOUNT, openat2};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens a directory as the root for [`open_directory_beneath`].
///
/// # Errors
/// As `openat(2)`.
pub fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())
}

/// Opens a directory below a root. Neither `..`, nor an absolute path, nor a symlink can leave it.
///
/// # Errors
/// `EXDEV` if the path leaves the root, else as `openat2(2)`.
pub fn open_directory_beneath(root: impl AsFd, path: &str) -> Result<OwnedFd, Errno> {
    let path = Path::new(if path.is_empty() { "." } else { path });
    match openat2(&root, path, DIRECTORY, Mode::empty(), BENEATH) {
        Err(Errno::NOSYS) => walk_beneath(root, path),
        result => result,
    }
}

/// Opens a directory below another one, on the same mount and not through any symlink.
///
/// # Errors
/// `ELOOP` if a component is a symlink, else as `openat2(2)`.
pub fn open_directory_without_symlinks(
    directory: impl AsFd,
    path: &Path,
) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = BENEATH_ON_ONE_MOUNT | ResolveFlags::NO_SYMLINKS;
    openat2(directory, path, DIRECTORY, Mode::empty(), resolve)
}

/// Opens a directory below another one, not through any symlink, but through mounts below it.
///
/// # Errors
/// `ELOOP` if a component is a symlink, else as `openat2(2)`.
pub fn open_directory_across_mounts(directory: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    openat2(directory, path, DIRECTORY, Mode::empty(), BENEATH | ResolveFlags::NO_SYMLINKS)
}

/// Opens a directory below another one, and creates it and those above it if they are missing. Not
/// through any symlink. Those that are created belong to the user and group, if there is one.
///
/// # Errors
/// `ELOOP` or `ENOTDIR` if a component is not a directory, else as `openat2(2)`, `mkdirat(2)` and
/// `fchownat(2)`.
pub fn create_directories_without_symlinks(
    directory: impl AsFd,
    path: &Path,
    owner: Option<(u32, u32)>,
) -> Result<OwnedFd, Errno> {
    let mut opened = open_directory_without_symlinks(directory, Path::new(""))?;
    for name in path.components() {
        let created =
            match rustix::fs::mkdirat(&opened, name.as_os_str(), Mode::from_raw_mode(0o755)) {
                Ok(()) => true,
                Err(Errno::EXIST) => false,
                Err(errno) => return Err(errno),
            };
        opened = open_directory_without_symlinks(&opened, Path::new(name.as_os_str()))?;
        if let Some((uid, gid)) = owner.filter(|_| created) {
            let uid = Some(Uid::from_raw(uid));
            let gid = Some(Gid::from_raw(gid));
            rustix::fs::chownat(&opened, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
    }
    Ok(opened)
}

/// Fallback for kernels without `openat2`: opens one component at a time and refuses every symlink.
fn walk_beneath(root: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = DIRECTORY.union(OFlags::NOFOLLOW);
    let mut directory = rustix::fs::openat(root, ".", flags, Mode::empty())?;
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) => {
                directory = rustix::fs::openat(&directory, name, flags, Mode::empty())?
            }
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(Errno::XDEV);
            }
        }
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_created_but_not_through_links() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(temp.path().join("root/a")).unwrap();
        std::fs::create_dir_all(temp.path().join("outside")).unwrap();
        std::os::unix::fs::symlink("../outside", temp.path().join("root/out")).unwrap();
        std::fs::write(temp.path().join("root/file"), "").unwrap();
        let root = open_directory(&temp.path().join("root")).unwrap();
        let create = |path: &str| {
            create_directories_without_symlinks(&root, Path::new(path), None).map(drop)
        };
        for path in ["a/b/c", "a/b/c", "d"] {
            create(path).unwrap();
            assert!(temp.path().join("root").join(path).is_dir());
        }
        assert_eq!(create("out/x"), Err(Errno::LOOP));
        assert_eq!(create("out"), Err(Errno::LOOP));
        assert_eq!(create("file/x"), Err(Errno::NOTDIR));
        assert!(!temp.path().join("outside/x").exists());
    }

    #[test]
    fn paths_inside_open_and_paths_outside_fail() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(temp.path().join("root/a/b")).unwrap();
        std::os::unix::fs::symlink("/", temp.path().join("root/out")).unwrap();
        std::os::unix::fs::symlink("a/b", temp.path().join("root/in")).unwrap();
        let root = open_directory(&temp.path().join("root")).unwrap();
        for inside in ["", "a", "a/b/..", "in"] {
            assert!(open_directory_beneath(&root, inside).is_ok(), "{inside}");
        }
        for outside in ["..", "a/../..", "/", "out", "out/tmp"] {
            assert_eq!(
                open_directory_beneath(&root, outside).unwrap_err(),
                Errno::XDEV,
                "{outside}"
            );
        }
        for (path, errno) in [
            ("in", Errno::LOOP),
            ("out/tmp", Errno::LOOP),
            ("..", Errno::XDEV),
            ("x", Errno::NOENT),
        ] {
            assert_eq!(
                open_directory_without_symlinks(&root, Path::new(path)).unwrap_err(),
                errno,
                "{path}"
            );
        }
        assert!(open_directory_without_symlinks(&root, Path::new("a/b")).is_ok());
        assert_eq!(open_directory_beneath(&root, "absent").unwrap_err(), Errno::NOENT);
        let walk = |path: &str| walk_beneath(&root, Path::new(path));
        assert!(walk(".").is_ok() && walk("a/b").is_ok());
        assert_eq!(walk("absent").unwrap_err(), Errno::NOENT);
        for outside in ["..", "a/..", "/", "out", "out/tmp", "in"] {
            assert!(walk(outside).is_err(), "{outside}");
        }
    }
}
