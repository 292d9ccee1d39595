//! Resolved paths and the files found there.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStringExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat},
    io::Errno,
};

use super::open::{BENEATH_ON_ONE_MOUNT, COMPONENT, openat2, retry};
use crate::fd::proc_fd_path;

/// The result of [`Root::resolve`](super::Root::resolve).
#[derive(Debug)]
pub struct ResolvedPath {
    /// The parent directory.
    pub parent: OwnedFd,
    /// The name in the parent; `.` for the root itself.
    pub name: OsString,
    /// The path from the root, without symlinks; empty for the root itself.
    pub path: PathBuf,
    /// The file, if it exists.
    pub entry: Option<Entry>,
}

/// A file behind an `O_PATH` descriptor: inspecting it does not open it.
#[derive(Debug)]
pub struct Entry {
    pub(super) fd: OwnedFd,
    /// The metadata of the file when the entry was made.
    pub stat: Stat,
}

impl ResolvedPath {
    /// Creates a file without a name on the file system of the parent directory, to be written and
    /// then linked. The kernel removes it when it is closed unlinked.
    ///
    /// # Errors
    /// As `open(2)` with `O_TMPFILE`.
    pub fn create_unnamed_file(&self) -> Result<File, Errno> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        // O_TMPFILE requires a mode; the caller sets the final one.
        let mode = Mode::RUSR | Mode::WUSR;
        openat2(&self.parent, Path::new("."), flags, mode, BENEATH_ON_ONE_MOUNT).map(File::from)
    }

    /// Looks up what has this name now. Does not follow a symlink.
    ///
    /// # Errors
    /// As `openat2(2)`; a missing file is `None`.
    pub fn lookup(&self) -> Result<Option<Entry>, Errno> {
        lookup(&self.parent, &self.name)
    }
}

impl Entry {
    /// The file behind a descriptor, with its current metadata.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, Errno> {
        rustix::fs::fstat(&fd).map(|stat| Self { fd, stat })
    }

    /// Reads the metadata of the same file again.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn refresh(self) -> Result<Self, Errno> {
        Self::from_fd(self.fd)
    }

    /// The type of the file.
    #[must_use]
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Opens this file for reading, whatever its name refers to by now.
    ///
    /// # Errors
    /// `EINVAL` unless it is a regular file or a directory: special files are never opened. Else as
    /// `open(2)`.
    pub fn open(&self) -> Result<File, Errno> {
        if !matches!(self.kind(), FileType::RegularFile | FileType::Directory) {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        retry(|| rustix::fs::openat(CWD, proc_fd_path(&self.fd), flags, Mode::empty()))
            .map(File::from)
    }

    /// Looks up a name in this directory. Does not follow a symlink.
    ///
    /// # Errors
    /// As `openat2(2)`; a missing file is `None`.
    pub fn lookup(&self, name: &OsStr) -> Result<Option<Self>, Errno> {
        lookup(&self.fd, name)
    }

    /// The target of a symlink.
    ///
    /// # Errors
    /// As `readlink(2)`.
    pub fn link_target(&self) -> Result<OsString, Errno> {
        let target = rustix::fs::readlinkat(&self.fd, "", Vec::new())?;
        Ok(OsString::from_vec(target.into_bytes()))
    }
}

impl AsFd for Entry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens one name in a directory, a symlink itself and not its target.
pub(super) fn open_component(directory: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let resolve = BENEATH_ON_ONE_MOUNT | ResolveFlags::NO_SYMLINKS;
    openat2(directory, Path::new(name), COMPONENT, Mode::empty(), resolve)
}

fn lookup(directory: &OwnedFd, name: &OsStr) -> Result<Option<Entry>, Errno> {
    match open_component(directory, name) {
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
        Ok(fd) => Entry::from_fd(fd).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read, os::unix::fs::symlink};

    use super::*;
    use crate::resolve_beneath::{FinalSymlink, tests::tree};

    #[test]
    fn entry_opens_after_its_name_is_replaced() {
        let (temp, root) = tree();
        let resolved = root.resolve(Path::new("a/b/file"), FinalSymlink::Follow).unwrap();
        let name = temp.path().join("root/a/b/file");
        fs::remove_file(&name).unwrap();
        symlink(temp.path().join("outside"), &name).unwrap();
        assert_eq!(
            fs::read_to_string(&name).unwrap(),
            "outside",
            "control: the name leads outside"
        );
        let mut text = String::new();
        resolved.entry.unwrap().open().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "inside");
    }

    #[test]
    fn special_file_is_never_opened() {
        let (temp, root) = tree();
        let fifo = temp.path().join("root/fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let entry = root.resolve(Path::new("fifo"), FinalSymlink::Follow).unwrap().entry.unwrap();
        assert_eq!(entry.kind(), FileType::Fifo);
        assert_eq!(entry.open().unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn unnamed_file_appears_when_linked() {
        let (temp, root) = tree();
        let resolved = root.resolve(Path::new("a/new"), FinalSymlink::Follow).unwrap();
        let file = resolved.create_unnamed_file().unwrap();
        assert_eq!(fs::read_dir(temp.path().join("root/a")).unwrap().count(), 1);
        let flags = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        rustix::fs::linkat(CWD, proc_fd_path(&file), &resolved.parent, &resolved.name, flags)
            .unwrap();
        assert!(temp.path().join("root/a/new").exists());
        assert!(resolved.lookup().unwrap().is_some());
    }
}
