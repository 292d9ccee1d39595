//! The directory of a held session, as file calls use it: paths are resolved inside it, checked
//! against the session's policy, and accessed as the session's user.

use std::{
    fs::DirBuilder,
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, lchown},
        },
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_policy::{FileAccess, FilesystemPolicy, Ids, WORKSPACE};
use codelia_proto::{
    HeldSession,
    v1::{self, FileKind},
};
use codelia_sys::{
    Errno,
    fs_identity::as_user,
    resolve_beneath::{
        Entry, FinalSymlink, ResolvedPath, Root, open_directory, open_directory_without_symlinks,
    },
};
use codelia_types::{LeaseEpoch, Mode, Reason, SessionId};
use rustix::fs::FileType;
use tokio::{sync::OwnedRwLockReadGuard, time::timeout};

use super::{error::FileError, limiter::CallPermit, reservation::Reservation};
use crate::core::Core;

/// How long a file call waits for a transactional run.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Whether a call reads, changes or adds files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    /// Moves or removes files.
    Change,
    /// Also adds files, or makes one larger.
    Add,
}

impl Use {
    /// Whether files are changed.
    pub(crate) fn changes(self) -> bool {
        self != Self::Read
    }
}

/// The directory of a session that this worker holds.
#[derive(Debug)]
pub(crate) struct Workspace {
    core: Arc<Core>,
    session: SessionId,
    epoch: LeaseEpoch,
    root: Root,
    /// The user of its commands on the host, if it is not the worker's.
    user: Option<Ids>,
    policy: FilesystemPolicy,
    /// When a call with one response must end. Nothing can abort a thread: loops check it.
    deadline: Instant,
    /// Keeps transactional runs away.
    in_use: Option<OwnedRwLockReadGuard<()>>,
    /// Held until the work is done, even if the caller has left.
    pub(crate) permit: CallPermit,
    /// The largest file that its commands may write.
    pub(crate) max_file_bytes: u64,
    /// Counts what the call writes, within the limits of the session's files.
    pub(crate) reservation: Reservation,
}

/// Waits until no transactional run is alone in the session. While it holds changes, its files may
/// only be read.
pub(super) async fn enter(
    core: &Core,
    session: SessionId,
    use_of_files: Use,
) -> Result<OwnedRwLockReadGuard<()>, FileError> {
    let lock = core.sessions.workspace(session);
    let limit = core.options.worker.file_call_timeout.min(MAX_WAIT);
    let entered = timeout(limit, lock.read_owned()).await.map_err(|_| Reason::SessionBusy)?;
    if use_of_files.changes() && core.sessions.hold(session).is_some() {
        return Err(Reason::SessionHoldsChanges.into());
    }
    Ok(entered)
}

impl Workspace {
    /// Opens a workspace, if its session is held under the lease that the caller names.
    pub(super) fn open(
        core: Arc<Core>,
        requested: &HeldSession,
        permit: CallPermit,
        use_of_workspace: OwnedRwLockReadGuard<()>,
        use_of_files: Use,
    ) -> Result<Self, FileError> {
        let HeldSession { session, epoch, .. } = *requested;
        let (spec, ids) = core.sessions.for_files(session, epoch).ok_or(Reason::Unavailable)?;
        let root = Root::open(&core.root.session(session), Path::new(WORKSPACE))?;
        let workspace = Self {
            // In mode `logical` commands run as the worker's own user.
            user: (spec.mode != Mode::Logical).then_some(ids),
            policy: spec.policy.filesystem,
            max_file_bytes: spec.limits.file_bytes,
            deadline: Instant::now() + core.options.worker.file_call_timeout,
            permit,
            in_use: Some(use_of_workspace),
            reservation: Reservation::new(core.disk.clone(), session, use_of_files.changes()),
            core,
            session,
            epoch,
            root,
        };
        workspace.check_held()?;
        Ok(workspace)
    }

    /// Fails if the session is no longer held under the lease that the call began with.
    pub(crate) fn check_held(&self) -> Result<(), FileError> {
        let is_held = self.core.sessions.for_files(self.session, self.epoch).is_some();
        if is_held && self.core.lease.is_live() { Ok(()) } else { Err(Reason::Unavailable.into()) }
    }

    /// Lets transactional runs begin although the call continues. It must not change files.
    pub(crate) fn leave(&mut self) {
        self.in_use = None;
    }

    /// Opens a directory of the workspace, not through any symlink.
    pub(crate) fn open_directory(&self, path: &Path) -> Result<OwnedFd, Errno> {
        open_directory_without_symlinks(&self.root, path)
    }

    /// Fails if the call has taken too long.
    pub(crate) fn check_deadline(&self) -> Result<(), FileError> {
        if Instant::now() < self.deadline { Ok(()) } else { Err(Reason::FileCallTimeout.into()) }
    }

    /// Does `work` as the user of the session's commands.
    pub(crate) fn as_session<T>(
        &self,
        work: impl FnOnce() -> Result<T, FileError>,
    ) -> Result<T, FileError> {
        match self.user {
            None => work(),
            Some(Ids { uid, gid }) => as_user(uid, gid, work).map_err(FileError::from)?,
        }
    }

    /// Resolves a path and checks the policy. Call it as the session.
    pub(crate) fn resolve(
        &self,
        path: &str,
        final_symlink: FinalSymlink,
        access: FileAccess,
    ) -> Result<ResolvedPath, FileError> {
        let resolved = self.root.resolve(Path::new(path), final_symlink)?;
        self.check_policy(access, &resolved.path)?;
        Ok(resolved)
    }

    /// Checks the policy for a path in the workspace that has no links in it.
    pub(crate) fn check_policy(&self, access: FileAccess, path: &Path) -> Result<(), FileError> {
        Ok(self.policy.check_file(access, &Path::new(WORKSPACE).join(path))?)
    }

    /// Resolves a path that must exist.
    pub(crate) fn find_entry(
        &self,
        path: &str,
        final_symlink: FinalSymlink,
        access: FileAccess,
    ) -> Result<(ResolvedPath, Entry), FileError> {
        let mut resolved = self.resolve(path, final_symlink, access)?;
        let entry = resolved.entry.take().ok_or(Reason::FileNotFound)?;
        Ok((resolved, entry))
    }

    /// Resolves a path to a regular file.
    pub(crate) fn find_file(&self, path: &str) -> Result<(ResolvedPath, Entry), FileError> {
        let (resolved, entry) = self.find_entry(path, FinalSymlink::Follow, FileAccess::Read)?;
        check_regular(&entry)?;
        Ok((resolved, entry))
    }

    /// Whether a path in the workspace may appear in a listing.
    pub(crate) fn may_see(&self, path: &Path) -> bool {
        self.check_policy(FileAccess::Read, path).is_ok()
    }

    /// A directory for entries that are about to be removed or put in place atomically. It is on
    /// the session's file system, out of its reach, and emptied when a worker takes the session.
    pub(crate) fn trash(&self) -> PathBuf {
        self.core.root.session_trash(self.session)
    }

    /// A directory for imports that are not complete. It is next to the workspace, out of reach of
    /// commands, and emptied when a worker takes the session.
    pub(crate) fn imports(&self) -> PathBuf {
        self.core.root.imports(self.session)
    }

    /// Creates a directory of the session's user in the trash.
    pub(crate) fn create_in_trash(&self, name: &str) -> Result<OwnedFd, FileError> {
        self.create_private(&self.trash().join(name))
    }

    /// Creates a directory of the session's user.
    pub(crate) fn create_private(&self, path: &Path) -> Result<OwnedFd, FileError> {
        DirBuilder::new().mode(0o700).create(path)?;
        if let Some(Ids { uid, gid }) = self.user {
            lchown(path, Some(uid), Some(gid))?;
        }
        Ok(open_directory(path)?)
    }
}

/// Fails unless the entry is a regular file.
pub(crate) fn check_regular(entry: &Entry) -> Result<(), FileError> {
    match entry.kind() {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Reason::IsADirectory.into()),
        // Links are followed, so this one is dangling.
        FileType::Symlink => Err(Reason::FileNotFound.into()),
        _ => Err(Reason::SpecialFile.into()),
    }
}

/// The description of a file that callers see.
pub(crate) fn describe(path: &Path, entry: &Entry) -> Result<v1::File, FileError> {
    let stat = &entry.stat;
    let (kind, link_target) = match entry.kind() {
        FileType::RegularFile => (FileKind::Regular, String::new()),
        FileType::Directory => (FileKind::Directory, String::new()),
        FileType::Symlink => {
            (FileKind::Symlink, entry.link_target()?.to_string_lossy().into_owned())
        }
        _ => (FileKind::Special, String::new()),
    };
    let nanos = i32::try_from(stat.st_mtime_nsec).unwrap_or(0);
    Ok(v1::File {
        path: String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned(),
        kind: kind.into(),
        size_bytes: stat.st_size,
        modify_time: Some(prost_types::Timestamp { seconds: stat.st_mtime, nanos }),
        mode: (stat.st_mode & 0o777).cast_signed(),
        etag: etag(entry),
        link_target,
    })
}

/// A tag that changes with the file: a file that replaces it has another inode, and any change to
/// it moves its change time, which cannot be set.
pub(crate) fn etag(entry: &Entry) -> String {
    let stat = &entry.stat;
    format!("{:x}-{:x}-{:x}.{:x}", stat.st_ino, stat.st_size, stat.st_ctime, stat.st_ctime_nsec)
}
