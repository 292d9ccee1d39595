//! A file that is being written. It has no name until it is complete, so an interrupted call,
//! worker or host leaves nothing behind. The session's user writes it: the worker's own rights
//! would pass quotas and take the blocks that are reserved for root.

use std::{
    fs::{File, Permissions},
    io::{self, Read, Write},
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt, PermissionsExt},
    },
    path::Path,
    time::SystemTime,
};

use codelia_policy::FileAccess;
use codelia_proto::v1;
use codelia_sys::{
    Errno,
    resolve_beneath::{Entry, FinalSymlink, ResolvedPath, proc_fd_path},
};
use codelia_types::{DiskUsage, Reason};
use rustix::fs::{AtFlags, CWD, linkat, renameat};
use uuid::Uuid;

use super::{
    error::FileError,
    reservation::{NEW_ENTRY, UnnamedBytes},
    workspace::{Workspace, check_regular, describe, etag},
};
use crate::workspace::trash;

/// The mode of a new file whose caller sets none.
const DEFAULT_MODE: u32 = 0o644;
/// Neither set-user-id, nor set-group-id, nor sticky.
const MODE_MASK: u32 = 0o777;
/// Upkeep may remove a name from the trash before it is moved; it does so once a minute.
const MAX_ATTEMPTS: usize = 3;
/// How much of a file is copied before the deadline is checked.
const COPY_BYTES: u64 = 8 * 1024 * 1024;

/// How a file is written.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteOptions {
    /// Permission bits of the file; `None` keeps those of the file that it replaces.
    pub(crate) mode: Option<u32>,
    /// Whether an existing file may be replaced.
    pub(crate) replace: bool,
    /// Replaces only the file with this etag; empty for any.
    pub(crate) etag: String,
}

/// A file that is being written.
#[derive(Debug)]
pub(crate) struct Upload {
    target: ResolvedPath,
    file: File,
    written: u64,
    options: WriteOptions,
    unnamed: UnnamedBytes,
}

impl Upload {
    /// Begins to write the file at a path. Call it as the session.
    pub(crate) fn begin(
        workspace: &Workspace,
        path: &str,
        options: WriteOptions,
    ) -> Result<Self, FileError> {
        let target = workspace.resolve(path, FinalSymlink::Follow, FileAccess::Write)?;
        Self::begin_at(workspace, target, options)
    }

    /// Begins to write the file that a path was resolved to. Call it as the session.
    pub(crate) fn begin_at(
        workspace: &Workspace,
        target: ResolvedPath,
        options: WriteOptions,
    ) -> Result<Self, FileError> {
        target.entry.as_ref().map_or(Ok(()), check_regular)?;
        workspace.reservation.take(NEW_ENTRY)?;
        let mode = options.mode.or(target.entry.as_ref().map(|entry| entry.stat.st_mode));
        let file = target.create_unnamed_file()?;
        file.set_permissions(Permissions::from_mode(mode.unwrap_or(DEFAULT_MODE) & MODE_MASK))?;
        let upload =
            Self { target, file, written: 0, options, unnamed: workspace.reservation.unnamed() };
        upload.check_unchanged()?;
        Ok(upload)
    }

    /// Appends bytes.
    pub(crate) fn append(&mut self, workspace: &Workspace, data: &[u8]) -> Result<(), FileError> {
        self.written += data.len() as u64;
        if self.written > workspace.max_file_bytes {
            return Err(Reason::FileTooLarge.into());
        }
        workspace.reservation.take(DiskUsage { bytes: data.len() as u64, inodes: 0 })?;
        self.unnamed.add(data.len() as u64);
        workspace.as_session(|| Ok(self.file.write_all(data)?))
    }

    /// Appends all of another file.
    pub(crate) fn append_file(
        &mut self,
        workspace: &Workspace,
        from: &File,
    ) -> Result<(), FileError> {
        loop {
            workspace.check_deadline()?;
            // One byte more than allowed shows that the file is too large.
            let left = workspace.max_file_bytes.saturating_add(1) - self.written;
            let mut part = from.take(left.min(COPY_BYTES));
            let copied = workspace.as_session(|| Ok(io::copy(&mut part, &mut self.file)?))?;
            workspace.reservation.take(DiskUsage { bytes: copied, inodes: 0 })?;
            self.unnamed.add(copied);
            self.written += copied;
            if self.written > workspace.max_file_bytes {
                return Err(Reason::FileTooLarge.into());
            }
            if copied == 0 {
                return Ok(());
            }
        }
    }

    /// Sets the time of the last modification.
    pub(crate) fn set_modified(&self, time: SystemTime) -> Result<(), FileError> {
        Ok(self.file.set_modified(time)?)
    }

    /// Gives the file its name atomically.
    pub(crate) fn publish(mut self, workspace: &Workspace) -> Result<v1::File, FileError> {
        workspace.check_held()?;
        self.check_unchanged()?;
        match workspace
            .as_session(|| Ok(self.link(&self.target.parent, Path::new(&self.target.name))?))
        {
            Err(error) if error.reason == Reason::FileExists && self.options.replace => {
                self.replace(workspace)?
            }
            linked => linked?,
        }
        self.unnamed.set_named();
        describe(&self.target.path, &Entry::from_fd(self.file.into())?)
    }

    /// Replaces the file by renaming over it. That needs a name, which the file gets in a directory
    /// of the session's user that its commands cannot reach.
    fn replace(&self, workspace: &Workspace) -> Result<(), FileError> {
        for _ in 0..MAX_ATTEMPTS {
            let name = Uuid::new_v4().to_string();
            let directory = workspace.create_in_trash(&name)?;
            let renamed = workspace.as_session(|| {
                self.link(&directory, Path::new("file"))?;
                Ok(renameat(&directory, "file", &self.target.parent, &self.target.name)?)
            });
            if let Err(error) = trash::remove(&workspace.trash(), Path::new(&name)) {
                tracing::warn!(%error, "cannot remove directory from the trash, leaving it to upkeep");
            }
            match renamed {
                Err(error) if error.reason == Reason::FileNotFound => {}
                renamed => return renamed,
            }
        }
        Err(Reason::FileNotFound.into())
    }

    fn link(&self, directory: &OwnedFd, name: &Path) -> Result<(), Errno> {
        linkat(CWD, proc_fd_path(&self.file), directory, name, AtFlags::SYMLINK_FOLLOW)
    }

    fn check_unchanged(&self) -> Result<(), FileError> {
        let existing = self.target.lookup()?;
        if existing.is_some() && !self.options.replace {
            return Err(Reason::FileExists.into());
        }
        let same = |current: String| current == self.options.etag;
        if self.options.etag.is_empty() || existing.as_ref().map(etag).is_some_and(same) {
            Ok(())
        } else {
            Err(Reason::FileChanged.into())
        }
    }
}

/// Reads up to `max` bytes at an offset; fewer at the end of the file.
pub(crate) fn read_at(file: &File, offset: u64, max: usize) -> Result<Vec<u8>, FileError> {
    let mut bytes = vec![0; max];
    let mut filled = 0;
    while filled < max {
        match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}
