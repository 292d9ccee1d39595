//! The session root: the directory tree that holds one directory for each session.
//!
//! `sessions/ID` belongs to the worker and lets only the session's own user pass. In it are the
//! workspace, which the session's commands own and may open to everyone, its overlays, its trash,
//! and imports that are not complete. It may be the mount point of an image.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, lchown},
    path::{Path, PathBuf},
    sync::Arc,
};

use codelia_policy::{DiskLimits, Ids};
use codelia_types::{LeaseEpoch, RunId, SessionId};
use tokio::task::JoinError;
use uuid::Uuid;

use crate::{
    UidRange,
    disk::Quota,
    file_work::{if_exists, unless_exists},
    workspace::{transaction::Transaction, trash, user_ids::SessionUsers, volumes::VolumeDirs},
};

/// A step on the session root that failed.
#[derive(Debug, thiserror::Error)]
#[error("session root: cannot {step} {}", .path.display())]
pub struct RootError {
    step: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl RootError {
    /// The work could not be finished.
    pub(crate) fn interrupted(source: io::Error) -> Self {
        Self { step: "finish work in", path: PathBuf::new(), source }
    }

    pub(crate) fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { step, path: path.to_owned(), source }
    }
}

/// The thread that did the work panicked.
impl From<JoinError> for RootError {
    fn from(panic: JoinError) -> Self {
        Self::interrupted(panic.into())
    }
}

/// The directory tree that holds sessions.
#[derive(Debug)]
pub(crate) struct SessionRoot {
    path: PathBuf,
    users: SessionUsers,
    /// The mechanism that limits the disk space of sessions, unless they are scanned.
    quota: Option<Arc<dyn Quota>>,
    /// Identifies the tree; workers that share it have the same id.
    pub(crate) id: Uuid,
}

impl SessionRoot {
    /// Opens the tree and creates what is missing.
    pub(crate) fn open(path: &Path, uids: Option<UidRange>) -> Result<Self, RootError> {
        let (path, id) = identify(path)?;
        let users = SessionUsers::open(&path, uids);
        let root = Self { id, path, users, quota: None };
        create_private(&root.sessions())?;
        create_private(&root.trash())?;
        create_private(&root.path.join("volumes"))?;
        if root.users.are_separate() {
            // A session's user must be able to traverse to its directory but list nothing above it.
            set_mode(&root.path, 0o711)?;
            set_mode(&root.sessions(), 0o711)?;
            root.free_ids()?;
        } else {
            create_private(&root.path)?;
        }
        Ok(root)
    }

    /// Limits the disk space of sessions by a mechanism of the kernel.
    pub(crate) fn with_quota(self, quota: Option<Arc<dyn Quota>>) -> Self {
        Self { quota, ..self }
    }

    /// The mechanism that limits the disk space of sessions, unless they are scanned.
    pub(crate) fn quota(&self) -> Option<Arc<dyn Quota>> {
        self.quota.clone()
    }

    /// The tree's directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether each session has its own user.
    pub(crate) fn has_separate_users(&self) -> bool {
        self.users.are_separate()
    }

    /// Makes the directory of a session that this worker has just taken usable, if it exists.
    pub(crate) fn open_session(&self, id: SessionId, limits: DiskLimits) -> Result<(), RootError> {
        let directory = self.session_parent(id);
        let opened = self.quota.as_ref().map_or(Ok(()), |quota| quota.open(id, &directory, limits));
        opened.map_err(RootError::at("limit the disk space of", &directory))?;
        if self.quota.is_none() {
            return Ok(());
        }
        let created = unless_exists(DirBuilder::new().mode(0o700).create(self.own_trash(id)));
        // A new session has no directory yet.
        if_exists(created).map(drop).map_err(RootError::at("create the trash of", &directory))
    }

    /// Frees what sessions had that the worker gave up, or with `all` what any session has.
    pub(crate) fn close_sessions(&self, all: bool) {
        if let Some(quota) = &self.quota {
            quota.close(all);
        }
    }

    /// The workspace of a session.
    pub(crate) fn session(&self, id: SessionId) -> PathBuf {
        self.session_parent(id).join("workspace")
    }

    fn session_parent(&self, id: SessionId) -> PathBuf {
        self.sessions().join(id.to_string())
    }

    /// The directory for imports of a session that are not complete.
    pub(crate) fn imports(&self, id: SessionId) -> PathBuf {
        self.session_parent(id).join("workspace.imports")
    }

    /// The trash for files of a session. With a quota it is on the session's own file system or in
    /// its project, since files cannot be moved between those.
    pub(crate) fn session_trash(&self, id: SessionId) -> PathBuf {
        if self.quota.is_some() { self.own_trash(id) } else { self.trash() }
    }

    fn own_trash(&self, id: SessionId) -> PathBuf {
        self.session_parent(id).join("workspace.trash")
    }

    /// Moves interrupted imports to the trash, and empties the session's own one.
    fn discard_leftovers(&self, id: SessionId) -> Result<(), RootError> {
        let imports = self.imports(id);
        let trash = self.own_trash(id);
        if self.quota.is_some() {
            create_private(&trash)?;
        }
        move_if_present(&imports, &self.session_trash(id))?;
        match move_if_present(&trash, &self.trash()) {
            // The session has a file system of its own.
            Err(error) if error.source.kind() == ErrorKind::CrossesDevices => {
                empty(&trash).map(drop)?
            }
            moved => moved?,
        }
        if self.quota.is_some() { create_private(&trash) } else { Ok(()) }
    }

    /// Whether a session has a workspace.
    pub(crate) fn has_session(&self, id: SessionId) -> Result<bool, RootError> {
        let path = self.session(id);
        path.try_exists().map_err(RootError::at("look for", &path))
    }

    /// Creates a session's workspace; returns whether it existed, and its owner.
    pub(crate) fn create_session(&self, id: SessionId) -> Result<(bool, Ids), RootError> {
        let parent = self.session_parent(id);
        let path = self.session(id);
        create_if_absent(&parent)?;
        let existed = !create_if_absent(&path)?;
        self.discard_leftovers(id)?;
        let ids =
            self.users.assign(id, &path).map_err(RootError::at("change the owner of", &path))?;
        if self.users.are_separate() {
            // A setuid file in an open workspace is out of reach of the host's other users.
            lchown(&parent, None, Some(ids.gid))
                .map_err(RootError::at("change the group of", &parent))?;
            set_mode(&parent, 0o710)?;
        }
        if let Some(quota) = &self.quota {
            let adopted = quota.adopt(&parent, &[path, self.own_trash(id)], ids);
            adopted.map_err(RootError::at("limit the disk space of", &parent))?;
        }
        Ok((existed, ids))
    }

    /// Removes a session's workspace and overlays, and returns the size of its files in bytes. The
    /// name is free immediately. After a failure the same call continues the removal.
    pub(crate) fn remove_session(&self, id: SessionId) -> Result<u64, RootError> {
        let from = self.session_parent(id);
        let name = id.to_string();
        let owner = self.users.owner(&from).or_else(|| self.users.owner(&self.trash().join(&name)));
        let removed = self.quota.as_ref().map_or(Ok(0), |quota| quota.remove(id, &from));
        let removed = removed.map_err(RootError::at("remove the disk image of", &from))?;
        let bytes = removed + self.discard(&from, &name)?;
        if let Some(uid) = owner {
            // A directory that never had its owner belongs to root.
            let quota = self.quota.as_ref().filter(|_| uid != 0);
            let released = quota.map_or(Ok(()), |quota| quota.release(uid));
            released.map_err(RootError::at("remove the quota of", &from))?;
            self.users.free(id, uid).map_err(RootError::at("free the user id of", &from))?;
        }
        Ok(bytes)
    }

    /// Moves a directory to the trash under `name` and removes it there.
    fn discard(&self, from: &Path, name: &str) -> Result<u64, RootError> {
        let bytes = self.remove_from_trash(name)?;
        let moved = if_exists(fs::rename(from, self.trash().join(name)));
        match moved.map_err(RootError::at("move to the trash", from))? {
            Some(()) => Ok(bytes + self.remove_from_trash(name)?),
            None => Ok(bytes),
        }
    }

    /// The transaction of a run, whether it exists or not.
    pub(crate) fn transaction(&self, id: SessionId, run: RunId, epoch: LeaseEpoch) -> Transaction {
        Transaction::new(run, epoch, self.session(id), self.session_trash(id))
    }

    /// The transactions that a session has.
    pub(crate) fn transactions(&self, id: SessionId) -> Result<Vec<Transaction>, RootError> {
        let path = self.session(id);
        Transaction::find(&path, &self.session_trash(id))
            .map_err(RootError::at("list transactions of", &path))
    }

    /// Finishes the transaction of a session that this worker has just taken.
    pub(crate) fn finish_transaction(
        &self,
        found: &Transaction,
        is_applied: bool,
    ) -> Result<(), RootError> {
        let path = found.layer();
        if is_applied {
            found.apply().map_err(RootError::at("apply the changes in", &path))?;
        }
        found.discard().and_then(|()| found.empty_trash()).map_err(RootError::at("remove", &path))
    }

    /// Removes what interrupted removals left in the trash.
    pub(crate) fn empty_trash(&self) -> Result<u64, RootError> {
        let mut bytes = empty(&self.trash())?;
        for id in self.list_sessions()? {
            bytes += empty(&self.own_trash(id))?;
        }
        Ok(bytes)
    }

    /// The sessions that have a directory here.
    pub(crate) fn list_sessions(&self) -> Result<Vec<SessionId>, RootError> {
        let dir = self.sessions();
        let mut ids = Vec::new();
        for entry in fs::read_dir(&dir).map_err(RootError::at("list", &dir))? {
            let name = entry.map_err(RootError::at("list", &dir))?.file_name();
            match name.to_str().and_then(|name| name.parse().ok()) {
                Some(id) => ids.push(id),
                None => {
                    tracing::warn!(name = %name.display(), "ignored an entry that is not a session directory")
                }
            }
        }
        Ok(ids)
    }

    /// The topmost directory above the root that the users of sessions cannot traverse, if any.
    pub(crate) fn untraversable_ancestor(&self) -> Option<PathBuf> {
        if self.users.are_separate() { untraversable_ancestor(&self.path) } else { None }
    }

    /// Records that a session's commands may write to these paths, before they can.
    pub(crate) fn share_paths(&self, ids: Ids, paths: &[PathBuf]) -> Result<(), RootError> {
        self.users
            .share(ids.uid, paths)
            .map_err(RootError::at("record shared paths in", &self.path))
    }

    fn free_ids(&self) -> Result<(), RootError> {
        let exists =
            |name: &Path| self.sessions().join(name).exists() || self.trash().join(name).exists();
        self.users.free_unused(exists).map_err(RootError::at("free user ids in", &self.path))
    }

    fn remove_from_trash(&self, name: &str) -> Result<u64, RootError> {
        let trash = self.trash();
        trash::remove(&trash, Path::new(name)).map_err(RootError::at("remove from", &trash))
    }

    fn sessions(&self) -> PathBuf {
        self.path.join("sessions")
    }

    /// The directories of volumes.
    pub(crate) fn volumes(&self) -> VolumeDirs {
        VolumeDirs::new(&self.path, self.trash(), self.users.are_separate())
    }

    /// Where directories are moved to be removed. Only the worker can reach it.
    pub(crate) fn trash(&self) -> PathBuf {
        self.path.join("trash")
    }
}

/// The topmost directory above `root` that other users cannot traverse. Missing directories do not
/// count: the worker creates them.
#[must_use]
pub fn untraversable_ancestor(root: &Path) -> Option<PathBuf> {
    let is_untraversable = |path: &&Path| {
        fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o001 == 0)
    };
    let above = root.parent()?;
    above.ancestors().filter(is_untraversable).last().map(Path::to_owned)
}

/// Creates the tree's directory if needed; returns its real path and its id.
pub(super) fn identify(path: &Path) -> Result<(PathBuf, Uuid), RootError> {
    // As root, sessions have their own users, which must be able to pass through new directories
    // above.
    let mode = if codelia_sys::process::own_uid() == 0 { 0o711 } else { 0o700 };
    DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
        .map_err(RootError::at("create", path))?;
    let path = fs::canonicalize(path).map_err(RootError::at("resolve", path))?;
    let id = root_id(&path)?;
    Ok((path, id))
}

/// Creates a directory that only the worker can use, or makes an existing one so.
fn create_private(path: &Path) -> Result<(), RootError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(RootError::at("create", path))?;
    set_mode(path, 0o700)
}

/// Moves a directory into the trash under a new name.
fn move_if_present(path: &Path, trash: &Path) -> Result<(), RootError> {
    let moved = if_exists(fs::rename(path, trash.join(Uuid::new_v4().to_string())));
    moved.map(drop).map_err(RootError::at("move to the trash", path))
}

/// Removes everything in a trash. A missing one is empty.
fn empty(trash: &Path) -> Result<u64, RootError> {
    let entries = if_exists(fs::read_dir(trash)).map_err(RootError::at("list", trash))?;
    let Some(entries) = entries else { return Ok(0) };
    let mut bytes = 0;
    for entry in entries {
        let name = entry.map_err(RootError::at("list", trash))?.file_name();
        bytes += trash::remove(trash, Path::new(&name)).map_err(RootError::at("empty", trash))?;
    }
    Ok(bytes)
}

/// Creates one directory, only for the worker. Returns whether it was absent.
fn create_if_absent(path: &Path) -> Result<bool, RootError> {
    unless_exists(DirBuilder::new().mode(0o700).create(path)).map_err(RootError::at("create", path))
}

fn set_mode(path: &Path, mode: u32) -> Result<(), RootError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(RootError::at("change the mode of", path))
}

/// Reads the tree's id, or creates it. Of workers that start concurrently, one wins.
fn root_id(root: &Path) -> Result<Uuid, RootError> {
    let path = root.join("root-id");
    if !path.exists() {
        let fresh = root.join(format!("root-id.{}", Uuid::new_v4()));
        write_id(&fresh).map_err(RootError::at("write", &fresh))?;
        let linked = fs::hard_link(&fresh, &path);
        fs::remove_file(&fresh).map_err(RootError::at("remove", &fresh))?;
        unless_exists(linked).map_err(RootError::at("create", &path))?;
    }
    let text = fs::read_to_string(&path).map_err(RootError::at("read", &path))?;
    let invalid =
        |error| RootError::at("parse", &path)(io::Error::new(ErrorKind::InvalidData, error));
    Uuid::try_parse(text.trim()).map_err(invalid)
}

fn write_id(path: &Path) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{}", Uuid::new_v4())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::{MetadataExt, symlink},
        thread,
    };

    use codelia_policy::overlays_dir;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn tree_and_sessions_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let root = SessionRoot::open(&dir.path().join("root"), None).unwrap();
        let id = SessionId::generate();
        assert!(!root.create_session(id).unwrap().0);
        assert!(root.create_session(id).unwrap().0, "the second call finds it");
        for path in [dir.path().join("root"), root.session(id)] {
            assert_eq!(mode(&path), 0o700);
        }
        assert_eq!(root.list_sessions().unwrap(), [id]);
    }

    #[test]
    fn concurrent_workers_agree_on_root_id() {
        let dir = tempfile::tempdir().unwrap();
        let open = || SessionRoot::open(dir.path(), None).unwrap().id;
        let ids: Vec<Uuid> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]));
        assert_eq!(open(), ids[0]);
    }

    #[test]
    fn session_removal_stays_within_its_directories() {
        let dir = tempfile::tempdir().unwrap();
        let root = SessionRoot::open(dir.path(), None).unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "kept").unwrap();
        let id = SessionId::generate();
        root.create_session(id).unwrap();
        let session = root.session(id);
        fs::create_dir_all(session.join("a/b")).unwrap();
        fs::write(session.join("a/b/file"), "12345").unwrap();
        symlink(&outside, session.join("a/link")).unwrap();
        fs::set_permissions(session.join("a/b"), fs::Permissions::from_mode(0o000)).unwrap();
        // The layers of an overlay, as the kernel leaves them.
        let layers = overlays_dir(&session);
        fs::create_dir_all(layers.join("one/work/work")).unwrap();
        fs::create_dir_all(layers.join("one/upper")).unwrap();
        fs::write(layers.join("one/upper/file"), "123").unwrap();
        fs::set_permissions(layers.join("one/work/work"), fs::Permissions::from_mode(0o000))
            .unwrap();
        assert_eq!(root.list_sessions().unwrap(), [id]);
        assert_eq!(root.remove_session(id).unwrap(), 8);
        assert!(!session.exists() && !layers.exists());
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
        assert_eq!(root.remove_session(id).unwrap(), 0, "a second removal is not an error");
        assert_eq!(fs::read_dir(dir.path().join("trash")).unwrap().count(), 0);
    }

    #[test]
    fn interrupted_removal_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        let root = SessionRoot::open(dir.path(), None).unwrap();
        fs::create_dir_all(dir.path().join("trash/old/deep")).unwrap();
        fs::write(dir.path().join("trash/old/deep/file"), "123").unwrap();
        assert_eq!(root.empty_trash().unwrap(), 3);
        assert_eq!(fs::read_dir(dir.path().join("trash")).unwrap().count(), 0);
    }

    #[test]
    fn session_with_own_user_is_private_and_removable() {
        let dir = tempfile::tempdir().unwrap();
        let range = UidRange { base: 300_000, count: 10 };
        let root = SessionRoot::open(dir.path(), Some(range)).unwrap();
        let missing =
            (!root.users.are_separate()).then_some("only root can change the owner of files");
        if !codelia_tests::available("root", missing) {
            return;
        }
        let id = SessionId::generate();
        let (_, ids) = root.create_session(id).unwrap();
        assert_eq!((mode(dir.path()), mode(&root.session(id))), (0o711, 0o700));
        // Only the session's group may pass: its commands may open the workspace to everyone.
        let parent = fs::metadata(root.session_parent(id)).unwrap();
        assert_eq!((parent.mode() & 0o7777, parent.uid(), parent.gid()), (0o710, 0, ids.gid));
        let inner = root.session(id).join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("file"), "12").unwrap();
        std::os::unix::fs::chown(&inner, Some(ids.uid), Some(ids.gid)).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o000)).unwrap();
        assert_eq!(root.remove_session(id).unwrap(), 2);
        assert_eq!(fs::read_dir(dir.path().join("ids")).unwrap().count(), 0);
    }
}
