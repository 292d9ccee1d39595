//! Moves the changes of a layer into the workspace. Every step can be the last one: a later call
//! continues with what the layer still has.
//!
//! Both trees are hostile. Names are opened one at a time and no link is followed.

use std::{ffi::CStr, io};

use codelia_sys::resolve_beneath::proc_fd_path;
use rustix::{
    fd::OwnedFd,
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, chmod, fchmod,
        fchown, fstat, futimens, mkdirat, openat, renameat, unlinkat,
    },
};
use uuid::Uuid;

use super::{DIRECTORY, MAX_DEPTH, attributes, is_whiteout, kind, names, status};

/// One application of changes.
pub(super) struct Apply<'a> {
    /// Takes directories that were replaced or removed.
    pub(super) replaced: OwnedFd,
    /// Asked before each step; `false` fails.
    pub(super) may_continue: &'a dyn Fn() -> bool,
}

impl Apply<'_> {
    /// Moves all of `upper` into `lower`, and gives that its attributes.
    pub(super) fn merge(&self, upper: &OwnedFd, lower: &OwnedFd) -> io::Result<()> {
        self.merge_at(upper, lower, 0)
    }

    fn merge_at(&self, upper: &OwnedFd, lower: &OwnedFd, depth: usize) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other("a directory is too deep"));
        }
        let stat = fstat(upper)?;
        let old = fstat(lower)?;
        if old.st_mode & 0o700 != 0o700 {
            self.step(|| fchmod(lower, Mode::from_raw_mode(old.st_mode & 0o7777 | 0o700)))?;
        }
        for name in names(upper)? {
            let Some(new) = status(upper, &name)? else { continue };
            if is_whiteout(&new) {
                self.remove(lower, &name)?;
                self.step(|| unlinkat(upper, &name, AtFlags::empty()))?;
            } else if kind(&new) == FileType::Directory {
                self.directory(upper, lower, &name, depth)?;
            } else {
                self.file(upper, lower, &name)?;
            }
        }
        self.copy_attributes(upper, &stat, lower)
    }

    /// Moves a file over the one in the workspace.
    fn file(&self, upper: &OwnedFd, lower: &OwnedFd, name: &CStr) -> io::Result<()> {
        if status(lower, name)?.is_some_and(|old| kind(&old) == FileType::Directory) {
            self.displace(lower, name)?;
        }
        self.step(|| renameat(upper, name, lower, name))
    }

    fn directory(
        &self,
        upper: &OwnedFd,
        lower: &OwnedFd,
        name: &CStr,
        depth: usize,
    ) -> io::Result<()> {
        let directory = openat(upper, name, DIRECTORY, Mode::empty())?;
        let old = status(lower, name)?;
        let is_directory = old.is_some_and(|old| kind(&old) == FileType::Directory);
        if is_directory && !attributes::is_opaque(&directory)? {
            return self.merge_into(upper, &directory, lower, name, depth);
        }
        // In this order: without its mark it would be merged, so nothing may be left to merge it
        // with.
        self.remove(lower, name)?;
        self.step_io(|| attributes::strip(upper, name, false))?;
        if attributes::remembered_mode(&directory)?.is_none() {
            return self.step(|| renameat(upper, name, lower, name));
        }
        // The mode would forbid its owner to move it, so a new one takes its entries and then its
        // mode.
        self.step(|| mkdirat(lower, name, Mode::RWXU))?;
        self.merge_into(upper, &directory, lower, name, depth)
    }

    /// Merges a directory into the one of the same name in the workspace, and removes it.
    fn merge_into(
        &self,
        upper: &OwnedFd,
        directory: &OwnedFd,
        lower: &OwnedFd,
        name: &CStr,
        depth: usize,
    ) -> io::Result<()> {
        let merged = self.open(lower, name)?;
        self.merge_at(directory, &merged, depth + 1)?;
        self.step(|| unlinkat(upper, name, AtFlags::REMOVEDIR))
    }

    /// Removes a name of the workspace. A missing one is fine.
    fn remove(&self, lower: &OwnedFd, name: &CStr) -> io::Result<()> {
        match status(lower, name)? {
            None => Ok(()),
            Some(old) if kind(&old) == FileType::Directory => self.displace(lower, name),
            Some(_) => self.step(|| unlinkat(lower, name, AtFlags::empty())),
        }
    }

    /// Moves a directory of the workspace away; it is removed later.
    fn displace(&self, lower: &OwnedFd, name: &CStr) -> io::Result<()> {
        // The owner of a directory may move it only if it may change it.
        drop(self.open(lower, name)?);
        self.step(|| renameat(lower, name, &self.replaced, Uuid::new_v4().to_string()))
    }

    /// Opens a directory of the workspace and lets its owner change it.
    fn open(&self, lower: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
        let directory = openat(lower, name, OFlags::PATH | DIRECTORY, Mode::empty())?;
        let mode = fstat(&directory)?.st_mode & 0o7777;
        if mode & 0o700 != 0o700 {
            let path = proc_fd_path(&directory);
            self.step(|| chmod(path, Mode::from_raw_mode(mode | 0o700)))?;
        }
        Ok(openat(lower, name, DIRECTORY, Mode::empty())?)
    }

    /// Gives a directory of the workspace the owner, mode, attributes and times of its change.
    fn copy_attributes(&self, upper: &OwnedFd, stat: &Stat, lower: &OwnedFd) -> io::Result<()> {
        self.step_io(|| attributes::copy(upper, lower))?;
        let old = fstat(lower)?;
        if (old.st_uid, old.st_gid) != (stat.st_uid, stat.st_gid) {
            let uid = Uid::from_raw(stat.st_uid);
            let gid = Gid::from_raw(stat.st_gid);
            self.step(|| fchown(lower, Some(uid), Some(gid)))?;
        }
        let mode = attributes::remembered_mode(upper)?.unwrap_or(stat.st_mode & 0o7777);
        self.step(|| fchmod(lower, Mode::from_raw_mode(mode)))?;
        let time = |seconds, nanos: u64| Timespec {
            tv_sec: seconds,
            tv_nsec: nanos.try_into().unwrap_or(0),
        };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
        };
        self.step(|| futimens(lower, &times))
    }

    fn step(&self, call: impl FnOnce() -> Result<(), rustix::io::Errno>) -> io::Result<()> {
        self.step_io(|| Ok(call()?))
    }

    fn step_io(&self, call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if (self.may_continue)() { call() } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}
