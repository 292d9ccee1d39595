//! Transactional runs: the directory with the changes of one run, and what becomes of them.
//!
//! `workspace.transactions/RUN.EPOCH` is next to the workspace, on the same file system:
//!
//! - `workspace/upper` and `workspace/work`, the layers of the overlay that the run sees;
//! - `replaced`, where directories wait that the changes replaced or removed;
//! - `prepared`, a file that exists once the changes are complete and on the disk.
//!
//! The row of the run in the store decides. A worker prepares the changes, commits the run, and
//! applies them. The next holder of the session finishes that ([`Transaction::find`]): it applies
//! prepared changes if the row says so and drops all others, before anything else sees the
//! workspace. Applying moves each change out of the layer, so a repeated call continues where the
//! last one stopped.

mod apply;
mod attributes;
mod scan;

use std::{
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use codelia_policy::transactions_dir;
use codelia_types::{Changes, LeaseEpoch, RunId};
use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, openat, statat,
        syncfs,
    },
    io::Errno,
};
use uuid::Uuid;

pub(crate) use self::scan::ScanError;
use crate::{
    fault,
    file_work::{if_exists, unless_exists},
    workspace::trash,
};

/// The name of the layer, which is also that of its mount point.
const LAYER: &str = "workspace";
/// Directories that are deeper than this cannot be changed: each level holds two descriptors open.
const MAX_DEPTH: usize = 100;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The changes of one transactional run.
#[derive(Debug, Clone)]
pub(crate) struct Transaction {
    pub(crate) run: RunId,
    /// The lease under which it was started, so that another attempt has another directory.
    pub(crate) epoch: LeaseEpoch,
    workspace: PathBuf,
    trash: PathBuf,
}

impl Transaction {
    /// Names the transaction of a run; nothing exists yet.
    pub(crate) fn new(run: RunId, epoch: LeaseEpoch, workspace: PathBuf, trash: PathBuf) -> Self {
        Self { run, epoch, workspace, trash }
    }

    /// The transactions that a session has.
    pub(crate) fn find(workspace: &Path, trash: &Path) -> io::Result<Vec<Self>> {
        let entries = if_exists(fs::read_dir(transactions_dir(workspace)))?;
        let Some(entries) = entries else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let parsed = name.to_str().and_then(|name| {
                let (run, epoch) = name.split_once('.')?;
                Some((run.parse().ok()?, LeaseEpoch(epoch.parse().ok()?)))
            });
            let unknown =
                || io::Error::new(ErrorKind::InvalidData, "not the name of a transaction");
            let (run, epoch) = parsed.ok_or_else(unknown)?;
            found.push(Self::new(run, epoch, workspace.to_owned(), trash.to_owned()));
        }
        Ok(found)
    }

    fn path(&self) -> PathBuf {
        transactions_dir(&self.workspace).join(format!("{}.{}", self.run, self.epoch.0))
    }

    /// The directory that takes the changes of the run.
    pub(crate) fn layer(&self) -> PathBuf {
        self.path().join(LAYER)
    }

    /// Creates the directory. The session's user passes through it to the mounted overlay.
    pub(crate) fn create(&self) -> io::Result<()> {
        self.discard()?;
        for path in [transactions_dir(&self.workspace), self.path()] {
            unless_exists(DirBuilder::new().mode(0o711).create(&path))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o711))?;
        }
        DirBuilder::new().mode(0o700).create(self.path().join("replaced"))?;
        fault::point("created");
        Ok(())
    }

    /// Lists the changes and readies them for being applied. Call it when the sandbox is gone.
    pub(crate) fn scan(&self) -> Result<Changes, ScanError> {
        let upper = open_directory(&self.layer().join("upper"))?;
        let workspace = open_directory(&self.workspace)?;
        scan::scan(&upper, &workspace)
    }

    /// Makes the changes durable and marks them as complete.
    pub(crate) fn prepare(&self) -> io::Result<()> {
        fault::point("scanned");
        let directory = open_directory(&self.path())?;
        syncfs(&directory)?;
        File::create_new(self.path().join("prepared"))?.sync_all()?;
        rustix::fs::fsync(&directory)?;
        fault::point("prepared");
        Ok(())
    }

    /// Whether the changes are complete.
    pub(crate) fn is_prepared(&self) -> io::Result<bool> {
        self.path().join("prepared").try_exists()
    }

    /// Applies prepared changes, or what is left of them. Nothing happens if that was done. Fails
    /// with [`ErrorKind::WouldBlock`] while another worker does it.
    pub(crate) fn apply(&self) -> io::Result<()> {
        let step = || {
            fault::point("apply");
            true
        };
        self.apply_while(&step)
    }

    /// Like [`Transaction::apply`], but fails when `may_continue` returns `false`.
    fn apply_while(&self, may_continue: &dyn Fn() -> bool) -> io::Result<()> {
        let path = self.path();
        let Some(directory) = if_exists(open_directory(&path))? else { return Ok(()) };
        flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
        // Another worker may have finished and removed it since it was opened.
        let own = rustix::fs::fstat(&directory)?;
        let found = if_exists(fs::metadata(&path))?;
        if found.is_none_or(|found| (found.dev(), found.ino()) != (own.st_dev, own.st_ino)) {
            return Ok(());
        }
        let upper = open_directory(&self.layer().join("upper"))?;
        let workspace = open_directory(&self.workspace)?;
        let replaced = open_directory(&path.join("replaced"))?;
        apply::Apply { replaced, may_continue }.merge(&upper, &workspace)?;
        if !may_continue() {
            return Err(ErrorKind::TimedOut.into());
        }
        fault::point("applied");
        self.discard()?;
        fault::point("discarded");
        Ok(())
    }

    /// Moves the directory to the trash, where [`Transaction::empty_trash`] or upkeep removes it.
    pub(crate) fn discard(&self) -> io::Result<()> {
        let moved = fs::rename(self.path(), self.trash_path(&Uuid::new_v4().to_string()));
        if if_exists(moved)?.is_none() {
            return Ok(());
        }
        match fs::remove_dir(transactions_dir(&self.workspace)) {
            Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes what [`Transaction::discard`] moved to the trash.
    pub(crate) fn empty_trash(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.trash)? {
            let name = entry?.file_name();
            if name.to_str().is_some_and(|name| name.starts_with(&self.run.to_string())) {
                trash::remove(&self.trash, Path::new(&name))?;
            }
        }
        Ok(())
    }

    fn trash_path(&self, unique: &str) -> PathBuf {
        self.trash.join(format!("{}.{unique}", self.run))
    }
}

fn open_directory(path: &Path) -> io::Result<rustix::fd::OwnedFd> {
    Ok(openat(CWD, path, DIRECTORY, Mode::empty())?)
}

/// The names in a directory.
fn names(directory: &impl rustix::fd::AsFd) -> io::Result<Vec<std::ffi::CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    Ok(names)
}

/// The status of a name, without following a symbolic link. `None` if it does not exist.
fn status(directory: &impl rustix::fd::AsFd, name: &std::ffi::CStr) -> io::Result<Option<Stat>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Whether it stands for a removed file of the workspace. The only device that is ever in a layer.
fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

#[cfg(test)]
mod tests;
