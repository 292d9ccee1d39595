//! Resolves a path one component at a time, each relative to the directory opened before it, so
//! that no name is looked up twice.

use std::{
    ffi::{OsStr, OsString},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags},
    io::Errno,
};

use super::{
    entry::{Entry, ResolvedPath, open_component},
    error::ResolveError,
    open::{BENEATH_ON_ONE_MOUNT, COMPONENT, openat2},
};
use crate::call::from_io;

/// The kernel's own limit.
const MAX_SYMLINKS: usize = 40;
/// Components in a path and the symlinks on it. Each `..` costs as much as the path is deep.
const MAX_STEPS: usize = 4096;

const DIRECTORY: OFlags = COMPONENT.union(OFlags::DIRECTORY);

/// A directory that no resolved path leaves.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
    /// The path inside the sandbox. Absolute symlink targets below it resolve from the root.
    path_inside: PathBuf,
}

/// How to treat a symlink that is the last component of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinalSymlink {
    /// Resolve its target.
    Follow,
    /// Return the symlink itself.
    NoFollow,
}

impl Root {
    /// Opens a directory as a root. `path_inside` is its path inside the sandbox.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open(path: &Path, path_inside: &Path) -> Result<Self, Errno> {
        let fd = rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())?;
        Ok(Self { fd, path_inside: path_inside.to_owned() })
    }

    /// Resolves a relative path. Only its last component may be missing.
    ///
    /// # Errors
    /// The path leaves the root, or the kernel refuses a step.
    pub fn resolve(
        &self,
        path: &Path,
        final_symlink: FinalSymlink,
    ) -> Result<ResolvedPath, ResolveError> {
        let mut walk = Walk {
            root: self,
            directory: self.fd.try_clone().map_err(from_io)?,
            names: Vec::new(),
            pending: Vec::new(),
            symlinks: 0,
            steps: 0,
        };
        walk.push_pending(path)?;
        walk.run(final_symlink)
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The state of one resolution.
struct Walk<'a> {
    root: &'a Root,
    /// The directory reached so far.
    directory: OwnedFd,
    /// The names from the root to `directory`.
    names: Vec<OsString>,
    /// The components left, the next one last.
    pending: Vec<Step>,
    /// How many symlinks were followed.
    symlinks: usize,
    /// How many components the path and the symlinks have.
    steps: usize,
}

enum Step {
    Parent,
    Child(OsString),
}

impl Walk<'_> {
    fn run(mut self, final_symlink: FinalSymlink) -> Result<ResolvedPath, ResolveError> {
        loop {
            let name = match self.pending.pop() {
                Some(Step::Parent) => {
                    self.names.pop().ok_or(ResolveError::OutsideRoot)?;
                    self.directory = self.reopen_directory()?;
                    continue;
                }
                Some(Step::Child(name)) => name,
                // The path ends in `directory`: look it up in its parent, unless it is the root.
                None => match self.names.pop() {
                    Some(name) => {
                        self.directory = self.reopen_directory()?;
                        name
                    }
                    None => return self.resolved_root(),
                },
            };
            if let Some(resolved) = self.step(name, final_symlink)? {
                return Ok(resolved);
            }
        }
    }

    /// Takes one step. Returns the result if it was the last one.
    fn step(
        &mut self,
        name: OsString,
        final_symlink: FinalSymlink,
    ) -> Result<Option<ResolvedPath>, ResolveError> {
        let is_last = self.pending.is_empty();
        let fd = match open_component(&self.directory, &name) {
            Err(Errno::NOENT) if is_last => return self.resolved(name, None).map(Some),
            result => result?,
        };
        let entry = Entry::from_fd(fd)?;
        match (entry.kind(), is_last) {
            (FileType::Symlink, false) => self.follow(&entry)?,
            (FileType::Symlink, true) if final_symlink == FinalSymlink::Follow => {
                self.follow(&entry)?
            }
            (_, true) => return self.resolved(name, Some(entry)).map(Some),
            (FileType::Directory, false) => {
                self.directory = entry.fd;
                self.names.push(name);
            }
            (_, false) => return Err(Errno::NOTDIR.into()),
        }
        Ok(None)
    }

    fn follow(&mut self, symlink: &Entry) -> Result<(), ResolveError> {
        self.symlinks += 1;
        if self.symlinks > MAX_SYMLINKS {
            return Err(Errno::LOOP.into());
        }
        let target = PathBuf::from(symlink.link_target()?);
        if !target.is_absolute() {
            return self.push_pending(&target);
        }
        let below_root =
            target.strip_prefix(&self.root.path_inside).map_err(|_| ResolveError::OutsideRoot)?;
        self.names.clear();
        self.directory = self.reopen_directory()?;
        self.push_pending(below_root)
    }

    fn push_pending(&mut self, path: &Path) -> Result<(), ResolveError> {
        for component in path.components().rev() {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                return Err(Errno::NAMETOOLONG.into());
            }
            match component {
                Component::Normal(name) => self.pending.push(Step::Child(name.to_owned())),
                Component::ParentDir => self.pending.push(Step::Parent),
                Component::CurDir => {}
                Component::RootDir | Component::Prefix(_) => return Err(ResolveError::OutsideRoot),
            }
        }
        Ok(())
    }

    /// Opens the directory that `names` lead to from the root.
    fn reopen_directory(&self) -> Result<OwnedFd, Errno> {
        let path: PathBuf = [OsStr::new(".")]
            .into_iter()
            .chain(self.names.iter().map(OsString::as_os_str))
            .collect();
        let resolve = BENEATH_ON_ONE_MOUNT | ResolveFlags::NO_SYMLINKS;
        openat2(&self.root.fd, &path, DIRECTORY, Mode::empty(), resolve)
    }

    fn resolved(&self, name: OsString, entry: Option<Entry>) -> Result<ResolvedPath, ResolveError> {
        let path = self.names.iter().chain([&name]).collect();
        let parent = self.directory.try_clone().map_err(from_io)?;
        Ok(ResolvedPath { parent, name, path, entry })
    }

    fn resolved_root(self) -> Result<ResolvedPath, ResolveError> {
        let entry = Entry::from_fd(self.directory.try_clone().map_err(from_io)?)?;
        let name = ".".into();
        let path = PathBuf::new();
        Ok(ResolvedPath { parent: self.directory, name, path, entry: Some(entry) })
    }
}
