//! Removal of a tree that a stranger filled: of any depth, with any modes, never through a symlink.
//!
//! Every directory found is moved up into the trash and emptied there, so neither the depth of a
//! tree nor the length of its paths matters, and two descriptors are enough.

use std::{
    ffi::CStr,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, chmodat, openat, renameat, statat, unlinkat},
    io::Errno,
};
use uuid::Uuid;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes `name` in the directory `trash` and returns the bytes of its files. What is not there is
/// removed already.
pub(crate) fn remove(trash: &Path, name: &Path) -> io::Result<u64> {
    let trash = openat(CWD, trash, DIRECTORY, Mode::empty())?;
    let mut bytes = 0;
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.last().cloned() {
        match remove_flat(&trash, &name) {
            // Another worker on this root removes it as well.
            Err(error) if error.kind() == io::ErrorKind::NotFound => drop(left.pop()),
            Err(error) => return Err(error),
            Ok(Removed::Yes(size)) => {
                bytes += size;
                left.pop();
            }
            Ok(Removed::After(size, moved)) => {
                bytes += size;
                left.extend(moved);
            }
        }
    }
    Ok(bytes)
}

enum Removed {
    /// It is gone.
    Yes(u64),
    /// Its files are gone; its directories were moved to the trash under these names.
    After(u64, Vec<PathBuf>),
}

fn remove_flat(trash: &OwnedFd, name: &Path) -> io::Result<Removed> {
    match kind(trash, name)? {
        None => Ok(Removed::Yes(0)),
        Some((FileType::Directory, _)) => empty(trash, name),
        Some((_, size)) => {
            gone(unlinkat(trash, name, AtFlags::empty()))?;
            Ok(Removed::Yes(size))
        }
    }
}

fn empty(trash: &OwnedFd, name: &Path) -> io::Result<Removed> {
    let dir = open(trash, name)?;
    let mut bytes = 0;
    let mut moved = Vec::new();
    for entry in Dir::read_from(&dir)? {
        let entry = entry?;
        let child = entry.file_name();
        if matches!(child.to_bytes(), b"." | b"..") {
            continue;
        }
        match kind(&dir, child)? {
            None => {}
            Some((FileType::Directory, _)) => moved.push(move_up(trash, &dir, child)?),
            Some((_, size)) => {
                gone(unlinkat(&dir, child, AtFlags::empty()))?;
                bytes += size;
            }
        }
    }
    if moved.is_empty() {
        gone(unlinkat(trash, name, AtFlags::REMOVEDIR))?;
        return Ok(Removed::Yes(bytes));
    }
    Ok(Removed::After(bytes, moved))
}

/// Opens a directory that its owner may have closed to us.
fn open(trash: &OwnedFd, name: &Path) -> io::Result<OwnedFd> {
    chmodat(trash, name, Mode::RWXU, AtFlags::empty())?;
    Ok(openat(trash, name, DIRECTORY, Mode::empty())?)
}

/// A directory can be moved only by who may write to it.
fn move_up(trash: &OwnedFd, dir: &OwnedFd, child: &CStr) -> io::Result<PathBuf> {
    let name = PathBuf::from(Uuid::new_v4().to_string());
    chmodat(dir, child, Mode::RWXU, AtFlags::empty())?;
    renameat(dir, child, trash, &name)?;
    Ok(name)
}

/// The type and size of an entry itself, never of what it points to; a file with other names holds no bytes.
fn kind<P: rustix::path::Arg>(dir: &OwnedFd, name: P) -> io::Result<Option<(FileType, u64)>> {
    match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => {
            let kind = FileType::from_raw_mode(stat.st_mode);
            let counts = kind == FileType::RegularFile && stat.st_nlink == 1;
            Ok(Some((kind, if counts { u64::try_from(stat.st_size).unwrap_or(0) } else { 0 })))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn gone(result: Result<(), Errno>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::mkdirat;

    use super::*;

    #[test]
    fn a_tree_deeper_than_any_path_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut here = openat(CWD, dir.path(), DIRECTORY, Mode::empty()).unwrap();
        let name = "d".repeat(200);
        for _ in 0..40 {
            mkdirat(&here, &name, Mode::RWXU).unwrap();
            here = openat(&here, &name, DIRECTORY, Mode::empty()).unwrap();
        }
        remove(dir.path(), Path::new(&name)).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
