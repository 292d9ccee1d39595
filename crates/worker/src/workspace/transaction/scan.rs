//! Lists the changes in a layer and readies them for being applied: afterwards they have nothing of
//! the overlay, except the mark of directories that replace others.
//!
//! The layer is hostile. Names are opened one at a time and no link is followed.

use std::{
    ffi::{CStr, OsStr},
    io,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

use codelia_sys::resolve_beneath::proc_fd_path;
use codelia_types::{Change, ChangeKind, ChangedFile, Changes, ChangesState};
use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, FileType, Mode, OFlags, Stat, chmod, fchmod, openat, unlinkat},
};
use tokio::task::JoinError;

use super::{DIRECTORY, MAX_DEPTH, attributes, is_whiteout, kind, names, status};

/// Changes that are applied at most. Bounds the memory and the time.
const MAX_ENTRIES: usize = 250_000;

/// Why changes cannot be applied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScanError {
    /// There are too many.
    #[error("more than {MAX_ENTRIES} files changed")]
    TooMany,
    /// A directory is too deep.
    #[error("a directory is more than {MAX_DEPTH} levels deep")]
    TooDeep,
    /// The layer has a device.
    #[error("a device was created")]
    Device,
    /// The layer cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for ScanError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}

impl From<JoinError> for ScanError {
    fn from(panic: JoinError) -> Self {
        Self::Io(panic.into())
    }
}

/// Lists the changes in the layer `upper`.
pub(super) fn scan(upper: &OwnedFd, workspace: &OwnedFd) -> Result<Changes, ScanError> {
    let mut scan =
        Scan { changes: Changes::none(ChangesState::Dropped), entries: 0, path: PathBuf::new() };
    let whole = Directory { upper, lower: Some(workspace), is_moved: true, depth: 0 };
    scan.directory(&whole)?;
    attributes::strip(upper, c".", false)?;
    Ok(scan.changes)
}

/// A directory of the layer.
struct Directory<'a> {
    upper: &'a OwnedFd,
    /// The one of the workspace. Without, it is new with all that is in it.
    lower: Option<&'a OwnedFd>,
    /// Whether its entries are moved one by one, not with it.
    is_moved: bool,
    depth: usize,
}

struct Scan {
    changes: Changes,
    entries: usize,
    path: PathBuf,
}

impl Scan {
    fn directory(&mut self, directory: &Directory<'_>) -> Result<(), ScanError> {
        if directory.depth > MAX_DEPTH {
            return Err(ScanError::TooDeep);
        }
        for name in names(directory.upper)? {
            self.entries += 1;
            if self.entries > MAX_ENTRIES {
                return Err(ScanError::TooMany);
            }
            self.path.push(OsStr::from_bytes(name.to_bytes()));
            self.entry(directory, &name)?;
            self.path.pop();
        }
        Ok(())
    }

    fn entry(&mut self, directory: &Directory<'_>, name: &CStr) -> Result<(), ScanError> {
        let Directory { upper, lower, .. } = *directory;
        let Some(stat) = status(upper, name)? else { return Ok(()) };
        let old = lower.map(|lower| status(lower, name)).transpose()?.flatten();
        let kind_of_change = if old.is_some() { ChangeKind::Changed } else { ChangeKind::Added };
        if is_whiteout(&stat) {
            if let Some(old) = &old {
                self.add(ChangeKind::Removed, old);
            } else {
                unlinkat(upper, name, AtFlags::empty())?;
            }
            return Ok(());
        }
        match (kind(&stat), old) {
            (FileType::Directory, old) => self.subdirectory(directory, name, &stat, old),
            (FileType::CharacterDevice | FileType::BlockDevice | FileType::Unknown, _) => {
                Err(ScanError::Device)
            }
            _ => {
                attributes::strip(upper, name, false)?;
                self.add(kind_of_change, &stat);
                Ok(())
            }
        }
    }

    fn subdirectory(
        &mut self,
        &Directory { upper, lower, is_moved, depth }: &Directory<'_>,
        name: &CStr,
        stat: &Stat,
        old: Option<Stat>,
    ) -> Result<(), ScanError> {
        let depth = depth + 1;
        let directory = open_accessible(upper, name, stat)?;
        let old_directory = old.filter(|old| kind(old) == FileType::Directory);
        let is_merged = old_directory.is_some() && !attributes::is_opaque(&directory)?;
        match (old_directory, lower) {
            (Some(old), Some(lower)) if is_merged => {
                if (old.st_mode, old.st_uid, old.st_gid) != (stat.st_mode, stat.st_uid, stat.st_gid)
                {
                    self.add(ChangeKind::Changed, stat);
                }
                let lower = openat(lower, name, OFlags::PATH | DIRECTORY, Mode::empty())?;
                self.directory(&Directory {
                    upper: &directory,
                    lower: Some(&lower),
                    is_moved: true,
                    depth,
                })?;
            }
            _ => {
                self.add(if old.is_some() { ChangeKind::Changed } else { ChangeKind::Added }, stat);
                let is_moved = is_moved && !is_accessible(stat);
                self.directory(&Directory { upper: &directory, lower: None, is_moved, depth })?;
            }
        }
        attributes::strip(upper, name, old_directory.is_some() && !is_merged)?;
        attributes::forget_mode(&directory)?;
        match (is_accessible(stat), is_moved) {
            (true, _) => {}
            (false, true) => attributes::remember_mode(&directory, stat.st_mode & 0o7777)?,
            (false, false) => fchmod(&directory, Mode::from_raw_mode(stat.st_mode & 0o7777))?,
        }
        Ok(())
    }

    fn add(&mut self, kind: ChangeKind, stat: &Stat) {
        let (file, size) = match super::kind(stat) {
            FileType::RegularFile => {
                (ChangedFile::Regular, u64::try_from(stat.st_size).unwrap_or(0))
            }
            FileType::Directory => (ChangedFile::Directory, 0),
            FileType::Symlink => (ChangedFile::Symlink, 0),
            _ => (ChangedFile::Special, 0),
        };
        let path = self.path.to_string_lossy().into_owned();
        self.changes.add(Change { kind, file, size, path });
    }
}

/// Whether the owner of a directory, which the worker is without root, may list and change it.
fn is_accessible(stat: &Stat) -> bool {
    stat.st_mode & 0o700 == 0o700
}

/// Opens a directory whose mode may not allow it.
fn open_accessible(parent: &OwnedFd, name: &CStr, stat: &Stat) -> io::Result<OwnedFd> {
    if !is_accessible(stat) {
        let directory = openat(parent, name, OFlags::PATH | DIRECTORY, Mode::empty())?;
        chmod(proc_fd_path(&directory), Mode::from_raw_mode(stat.st_mode & 0o7777 | 0o700))?;
    }
    Ok(openat(parent, name, DIRECTORY, Mode::empty())?)
}
