//! A file that is being written: without a name until it is whole, so that whatever ends the call,
//! the worker or the host before that leaves nothing.

use std::{
    fs::{File, Permissions},
    io::{self, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, PermissionsExt},
    },
    path::Path,
};

use codelia_policy::FileAccess;
use codelia_proto::{internal::v1::FileRefusalReason as Reason, v1};
use codelia_sys::{
    Errno,
    resolve_beneath::{self, Entry, FinalSymlink, ResolvedPath, proc_fd_path},
};
use rustix::fs::{AtFlags, CWD, linkat, renameat, unlinkat};
use uuid::Uuid;

use super::{
    error::Refusal,
    workspace::{Workspace, check_regular, describe, etag},
};

/// Of a file that was not there before and whose caller names no other.
const USUAL_MODE: u32 = 0o644;
/// The janitor may take what is about to appear for what is to be gone; it sweeps once in a minute.
const TRIES: usize = 3;

/// How a file is to be written.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    /// Its permission bits; `None` keeps those of the file before.
    pub(crate) mode: Option<u32>,
    /// Whether a file that is there may be replaced.
    pub(crate) replace: bool,
    /// Only the file with this etag may be; empty for any.
    pub(crate) etag: String,
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Upload {
    place: ResolvedPath,
    file: File,
    written: u64,
    wanted: Wanted,
}

impl Upload {
    /// Begins a file at a path. Call it as the session.
    pub(crate) fn begin(workspace: &Workspace, path: &str, wanted: Wanted) -> Result<Self, Refusal> {
        let place = workspace.find(path, FinalSymlink::Follow, FileAccess::Write)?;
        place.entry.as_ref().map_or(Ok(()), check_regular)?;
        let mode = wanted.mode.or(place.entry.as_ref().map(|entry| entry.stat.st_mode & 0o777));
        let file = place.create_unnamed_file()?;
        file.set_permissions(Permissions::from_mode(mode.unwrap_or(USUAL_MODE)))?;
        let upload = Self { place, file, written: 0, wanted };
        upload.check_unchanged()?;
        Ok(upload)
    }

    /// Adds bytes at its end.
    pub(crate) fn append(&mut self, workspace: &Workspace, data: &[u8]) -> Result<(), Refusal> {
        self.written += data.len() as u64;
        if self.written > workspace.most_bytes {
            return Err(Reason::TooLarge.into());
        }
        Ok(self.file.write_all(data)?)
    }

    /// Adds all of another file.
    pub(crate) fn append_file(&mut self, workspace: &Workspace, mut from: File) -> Result<(), Refusal> {
        // One byte more than may be, to see that there is more.
        let most = workspace.most_bytes.saturating_add(1);
        self.written += io::copy(&mut io::Read::take(&mut from, most), &mut self.file)?;
        if self.written > workspace.most_bytes { Err(Reason::TooLarge.into()) } else { Ok(()) }
    }

    /// Gives the file its name in one step.
    pub(crate) fn publish(self, workspace: &Workspace) -> Result<v1::File, Refusal> {
        workspace.check_held()?;
        self.check_unchanged()?;
        match workspace.as_session(|| Ok(self.link(&self.place.parent, Path::new(&self.place.name))?)) {
            Err(refusal) if refusal.reason == Reason::Exists && self.wanted.replace => {
                self.replace(&workspace.trash())?;
            }
            linked => linked?,
        }
        describe(&self.place.path, &Entry::from_fd(self.file.into())?)
    }

    /// A name can only be replaced by a name. This one is the worker's alone, where nothing that stays is lost:
    /// whether the session's user may write to the directory was seen when the file was begun in it.
    fn replace(&self, trash: &Path) -> Result<(), Refusal> {
        let trash = resolve_beneath::open_directory(trash)?;
        for _ in 0..TRIES {
            let name = Uuid::new_v4().to_string();
            self.link(&trash, Path::new(&name))?;
            match renameat(&trash, &name, &self.place.parent, &self.place.name) {
                Err(Errno::NOENT) => {}
                Err(errno) => {
                    unlinkat(&trash, &name, AtFlags::empty())?;
                    return Err(errno.into());
                }
                Ok(()) => return Ok(()),
            }
        }
        Err(Reason::Absent.into())
    }

    fn link(&self, directory: &OwnedFd, name: &Path) -> Result<(), Errno> {
        linkat(CWD, proc_fd_path(&self.file), directory, name, AtFlags::SYMLINK_FOLLOW)
    }

    fn check_unchanged(&self) -> Result<(), Refusal> {
        let there = self.place.lookup()?;
        if there.is_some() && !self.wanted.replace {
            return Err(Reason::Exists.into());
        }
        let same = |etag_now: String| etag_now == self.wanted.etag;
        if self.wanted.etag.is_empty() || there.as_ref().map(etag).is_some_and(same) {
            Ok(())
        } else {
            Err(Reason::Changed.into())
        }
    }
}

/// Reads bytes at a position; fewer, or none, at the end of the file.
pub(crate) fn read_at(file: &File, at: u64, most: usize) -> Result<Vec<u8>, Refusal> {
    let mut bytes = vec![0; most];
    let mut filled = 0;
    while filled < most {
        match file.read_at(&mut bytes[filled..], at + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}
