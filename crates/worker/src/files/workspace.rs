//! One held session's directory, as file calls see it: found without leaving it, decided by the
//! session's policy, touched as the session's own user.

use std::{
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use codelia_policy::{FileAccess, FilesystemPolicy, Ids, WORKSPACE};
use codelia_proto::{
    internal::v1::{FileRefusalReason as Reason, HeldSession},
    v1::{self, FileKind},
};
use codelia_sys::{
    fs_identity::as_user,
    resolve_beneath::{Entry, FinalSymlink, ResolvedPath, Root},
};
use codelia_types::{LeaseEpoch, Mode, SessionId};
use rustix::fs::FileType;

use super::error::Refusal;
use crate::worker::Worker;

/// The directory of a session that this worker holds.
#[derive(Debug)]
pub(crate) struct Workspace {
    worker: Arc<Worker>,
    session: SessionId,
    epoch: LeaseEpoch,
    root: Root,
    /// Who its commands are on the host, where that is not the worker itself.
    user: Option<Ids>,
    policy: FilesystemPolicy,
    /// The largest file that its commands may write.
    pub(crate) most_bytes: u64,
}

impl Workspace {
    /// Opens it, if the session is held under the lease that the caller names.
    pub(crate) fn open(worker: Arc<Worker>, asked: &HeldSession) -> Result<Self, Refusal> {
        let session: SessionId = asked.session_id.parse().map_err(|_| Reason::NotHeld)?;
        let epoch = LeaseEpoch(asked.lease_epoch);
        let (spec, ids) = worker.sessions.for_files(session, epoch).ok_or(Reason::NotHeld)?;
        let root = Root::open(&worker.root.session(session), Path::new(WORKSPACE))?;
        let workspace = Self {
            // In mode `logical` commands are the worker's own user.
            user: (spec.mode != Mode::Logical).then_some(ids),
            policy: spec.policy.filesystem,
            most_bytes: spec.limits.file_bytes,
            worker,
            session,
            epoch,
            root,
        };
        workspace.check_held()?;
        Ok(workspace)
    }

    /// Whether the session is still held under the lease that the call began with.
    pub(crate) fn check_held(&self) -> Result<(), Refusal> {
        let is_held = self.worker.sessions.for_files(self.session, self.epoch).is_some();
        if is_held && self.worker.current().is_live() { Ok(()) } else { Err(Reason::NotHeld.into()) }
    }

    /// Does something as the user that the session's commands are.
    pub(crate) fn as_session<T>(&self, work: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
        match self.user {
            None => work(),
            Some(Ids { uid, gid }) => as_user(uid, gid, work).map_err(Refusal::from)?,
        }
    }

    /// Finds a place and decides whether it may be used. Call it as the session.
    pub(crate) fn find(
        &self,
        path: &str,
        last: FinalSymlink,
        what: FileAccess,
    ) -> Result<ResolvedPath, Refusal> {
        let place = self.root.resolve(Path::new(path), last)?;
        self.policy.check_file(what, &Path::new(WORKSPACE).join(&place.path))?;
        Ok(place)
    }

    /// Finds what is there.
    pub(crate) fn find_entry(
        &self,
        path: &str,
        last: FinalSymlink,
        what: FileAccess,
    ) -> Result<(ResolvedPath, Entry), Refusal> {
        let mut place = self.find(path, last, what)?;
        let entry = place.entry.take().ok_or(Reason::Absent)?;
        Ok((place, entry))
    }

    /// Finds a file that can be opened.
    pub(crate) fn find_file(&self, path: &str) -> Result<(ResolvedPath, Entry), Refusal> {
        let (place, entry) = self.find_entry(path, FinalSymlink::Follow, FileAccess::Read)?;
        check_regular(&entry)?;
        Ok((place, entry))
    }

    /// Whether a path in the workspace may be seen by name, in a listing of what is around it.
    pub(crate) fn may_see(&self, path: &Path) -> bool {
        self.policy.check_file(FileAccess::Read, &Path::new(WORKSPACE).join(path)).is_ok()
    }

    /// Where what is to be gone is put, and what is to appear in one step comes from: on the same file
    /// system as the session, out of its reach, and emptied by the janitor.
    pub(crate) fn trash(&self) -> PathBuf {
        self.worker.root.trash()
    }
}

/// Refuses all but files.
pub(crate) fn check_regular(entry: &Entry) -> Result<(), Refusal> {
    match entry.kind() {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Reason::Directory.into()),
        // A link here leads nowhere: it was followed.
        FileType::Symlink => Err(Reason::Absent.into()),
        _ => Err(Reason::Special.into()),
    }
}

/// Tells about a file.
pub(crate) fn describe(path: &Path, entry: &Entry) -> Result<v1::File, Refusal> {
    let stat = &entry.stat;
    let (kind, link_target) = match entry.kind() {
        FileType::RegularFile => (FileKind::Regular, String::new()),
        FileType::Directory => (FileKind::Directory, String::new()),
        FileType::Symlink => (FileKind::Symlink, entry.link_target()?.to_string_lossy().into_owned()),
        _ => (FileKind::Special, String::new()),
    };
    let nanos = i32::try_from(stat.st_mtime_nsec).unwrap_or(0);
    Ok(v1::File {
        path: String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned(),
        kind: kind.into(),
        size_bytes: stat.st_size,
        modify_time: Some(prost_types::Timestamp { seconds: stat.st_mtime, nanos }),
        mode: stat.st_mode & 0o777,
        etag: etag(entry),
        link_target,
    })
}

/// Changes with the file: another one under the name has another number, and any change of this one
/// moves its change time, which nobody can set.
pub(crate) fn etag(entry: &Entry) -> String {
    let stat = &entry.stat;
    format!("{:x}-{:x}-{:x}.{:x}", stat.st_ino, stat.st_size, stat.st_ctime, stat.st_ctime_nsec)
}
