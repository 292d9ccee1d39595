//! The session root: one directory for each session, and how one is removed.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use codelia_policy::{Ids, OVERLAYS_SUFFIX, overlays_dir};
use codelia_types::SessionId;
use uuid::Uuid;

use crate::{UidRange, workspace::trash, workspace::user_ids::SessionIds};

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
    /// The work was not brought to its end.
    pub(crate) fn interrupted(source: io::Error) -> Self {
        Self { step: "finish work in", path: PathBuf::new(), source }
    }

    fn at(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { step, path: path.to_owned(), source }
    }
}

/// The directory tree that holds sessions.
#[derive(Debug)]
pub(crate) struct Root {
    path: PathBuf,
    ids: SessionIds,
    /// Names the tree; workers on a shared one have the same.
    pub(crate) id: Uuid,
}

impl Root {
    /// Opens the tree, creating what is missing.
    pub(crate) fn open(path: &Path, uids: Option<UidRange>) -> Result<Self, RootError> {
        create_private(path)?;
        let path = fs::canonicalize(path).map_err(RootError::at("resolve", path))?;
        let ids = SessionIds::open(path.join("ids"), uids);
        let root = Self { id: root_id(&path)?, path, ids };
        create_private(&root.sessions())?;
        create_private(&root.trash())?;
        if root.ids.are_own() {
            // A session's own user must come through to its directory, and see nothing on the way.
            make_passable(&root.path)?;
            make_passable(&root.sessions())?;
            root.free_ids()?;
        }
        Ok(root)
    }

    /// Where a session's files are.
    pub(crate) fn session(&self, id: SessionId) -> PathBuf {
        self.sessions().join(id.to_string())
    }

    /// Whether a session has its directory.
    pub(crate) fn has_session(&self, id: SessionId) -> Result<bool, RootError> {
        let path = self.session(id);
        path.try_exists().map_err(RootError::at("look for", &path))
    }

    /// Creates a session's directory; tells whether it was there, and whose it is.
    pub(crate) fn create_session(&self, id: SessionId) -> Result<(bool, Ids), RootError> {
        let path = self.session(id);
        let was_there = match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => false,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => true,
            Err(error) => return Err(RootError::at("create", &path)(error)),
        };
        let ids = self.ids.of(id, &path).map_err(RootError::at("give away", &path))?;
        Ok((was_there, ids))
    }

    /// Removes a session's directory, and before it what it changed in overlays, and tells how many bytes its files had.
    /// Its name is free at once. After a failure the same call takes the removal up again.
    pub(crate) fn remove_session(&self, id: SessionId) -> Result<u64, RootError> {
        let (from, name) = (self.session(id), id.to_string());
        let owner = self.ids.owner(&from).or_else(|| self.ids.owner(&self.trash().join(&name)));
        let bytes = self.discard(&overlays_dir(&from), &format!("{name}{OVERLAYS_SUFFIX}"))?
            + self.discard(&from, &name)?;
        if let Some(uid) = owner {
            self.ids.free(id, uid).map_err(RootError::at("free the id of", &from))?;
        }
        Ok(bytes)
    }

    /// Moves a directory to the trash under this name and removes it.
    fn discard(&self, from: &Path, name: &str) -> Result<u64, RootError> {
        let bytes = self.empty_trash_of(name)?;
        match fs::rename(from, self.trash().join(name)) {
            Ok(()) => Ok(bytes + self.empty_trash_of(name)?),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(bytes),
            Err(error) => Err(RootError::at("move to the trash", from)(error)),
        }
    }

    /// Removes what earlier removals left in the trash.
    pub(crate) fn empty_trash(&self) -> Result<u64, RootError> {
        let trash = self.trash();
        let mut bytes = 0;
        for entry in fs::read_dir(&trash).map_err(RootError::at("list", &trash))? {
            let name = entry.map_err(RootError::at("list", &trash))?.file_name();
            bytes += trash::remove(&trash, Path::new(&name)).map_err(RootError::at("empty", &trash))?;
        }
        Ok(bytes)
    }

    /// The sessions that have a directory here, or changes in overlays.
    pub(crate) fn list_sessions(&self) -> Result<Vec<SessionId>, RootError> {
        let dir = self.sessions();
        let mut ids = Vec::new();
        for entry in fs::read_dir(&dir).map_err(RootError::at("list", &dir))? {
            let name = entry.map_err(RootError::at("list", &dir))?.file_name();
            let name_of_session =
                |name: &str| name.strip_suffix(OVERLAYS_SUFFIX).unwrap_or(name).parse().ok();
            match name.to_str().and_then(name_of_session) {
                Some(id) => ids.push(id),
                None => tracing::warn!(?name, "not a session's directory: left alone"),
            }
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    /// The directory above sessions that their own users cannot pass through, if there is one.
    pub(crate) fn untraversable_ancestor(&self) -> Option<PathBuf> {
        if self.ids.are_own() { untraversable_ancestor(&self.path) } else { None }
    }

    fn free_ids(&self) -> Result<(), RootError> {
        let is_there = |name: &Path| self.sessions().join(name).exists() || self.trash().join(name).exists();
        self.ids.free_forgotten(is_there).map_err(RootError::at("free ids in", &self.path))
    }

    fn empty_trash_of(&self, name: &str) -> Result<u64, RootError> {
        let trash = self.trash();
        trash::remove(&trash, Path::new(name)).map_err(RootError::at("remove from", &trash))
    }

    fn sessions(&self) -> PathBuf {
        self.path.join("sessions")
    }

    /// What is to be gone: nobody but the worker reaches it, and it is emptied again and again.
    pub(crate) fn trash(&self) -> PathBuf {
        self.path.join("trash")
    }
}

/// The first directory above `root` that not everybody may pass through. What is not there yet is
/// the worker's to make.
#[must_use]
pub fn untraversable_ancestor(root: &Path) -> Option<PathBuf> {
    let is_blocked =
        |path: &&Path| fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o001 == 0);
    let above = root.parent()?;
    above.ancestors().filter(is_blocked).last().map(Path::to_owned)
}

/// Creates a directory for us alone, or makes sure that one that is there is.
fn create_private(path: &Path) -> Result<(), RootError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(RootError::at("create", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(RootError::at("make private", path))
}

fn make_passable(path: &Path) -> Result<(), RootError> {
    fs::set_permissions(path, fs::Permissions::from_mode(0o711))
        .map_err(RootError::at("open a way through", path))
}

/// Reads the tree's id, or gives it one. Of two workers that start at once, one wins.
fn root_id(root: &Path) -> Result<Uuid, RootError> {
    let path = root.join("root-id");
    if !path.exists() {
        let fresh = root.join(format!("root-id.{}", Uuid::new_v4()));
        write_id(&fresh).map_err(RootError::at("write", &fresh))?;
        let linked = fs::hard_link(&fresh, &path);
        fs::remove_file(&fresh).map_err(RootError::at("remove", &fresh))?;
        match linked {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(RootError::at("create", &path)(error));
            }
            _ => {}
        }
    }
    let text = fs::read_to_string(&path).map_err(RootError::at("read", &path))?;
    let invalid = |error| RootError::at("understand", &path)(io::Error::new(ErrorKind::InvalidData, error));
    Uuid::try_parse(text.trim()).map_err(invalid)
}

fn write_id(path: &Path) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{}", Uuid::new_v4())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::symlink, thread};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn the_tree_and_its_sessions_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::open(&dir.path().join("root"), None).unwrap();
        let id = SessionId::generate();
        assert!(!root.create_session(id).unwrap().0);
        assert!(root.create_session(id).unwrap().0, "the second time it is there");
        for path in [dir.path().join("root"), root.session(id)] {
            assert_eq!(mode(&path), 0o700);
        }
        assert_eq!(root.list_sessions().unwrap(), [id]);
    }

    #[test]
    fn workers_that_start_at_once_on_one_root_agree_on_its_id() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Root::open(dir.path(), None).unwrap().id;
        let ids: Vec<Uuid> = thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]));
        assert_eq!(open(), ids[0]);
    }

    #[test]
    fn a_session_is_removed_with_all_it_holds_and_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::open(dir.path(), None).unwrap();
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
        // As the kernel leaves the layers of an overlay.
        let layers = overlays_dir(&session);
        fs::create_dir_all(layers.join("one/work/work")).unwrap();
        fs::create_dir_all(layers.join("one/upper")).unwrap();
        fs::write(layers.join("one/upper/file"), "123").unwrap();
        fs::set_permissions(layers.join("one/work/work"), fs::Permissions::from_mode(0o000)).unwrap();
        assert_eq!(root.list_sessions().unwrap(), [id]);
        assert_eq!(root.remove_session(id).unwrap(), 8);
        assert!(!session.exists() && !layers.exists());
        assert_eq!(fs::read_to_string(outside.join("kept")).unwrap(), "kept");
        assert_eq!(root.remove_session(id).unwrap(), 0, "again is no error");
        assert_eq!(fs::read_dir(dir.path().join("trash")).unwrap().count(), 0);
    }

    #[test]
    fn what_an_interrupted_removal_left_is_removed_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::open(dir.path(), None).unwrap();
        fs::create_dir_all(dir.path().join("trash/old/deep")).unwrap();
        fs::write(dir.path().join("trash/old/deep/file"), "123").unwrap();
        assert_eq!(root.empty_trash().unwrap(), 3);
        assert_eq!(fs::read_dir(dir.path().join("trash")).unwrap().count(), 0);
    }

    #[test]
    fn a_session_with_an_id_of_its_own_is_reached_by_it_alone_and_removed_with_all_it_made() {
        let dir = tempfile::tempdir().unwrap();
        let range = UidRange { base: 300_000, count: 10 };
        let root = Root::open(dir.path(), Some(range)).unwrap();
        if !root.ids.are_own() {
            return println!("skipped: this user may not give files away");
        }
        let id = SessionId::generate();
        let (_, ids) = root.create_session(id).unwrap();
        assert_eq!((mode(dir.path()), mode(&root.session(id))), (0o711, 0o700));
        let inner = root.session(id).join("inner");
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("file"), "12").unwrap();
        std::os::unix::fs::chown(&inner, Some(ids.uid), Some(ids.gid)).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o000)).unwrap();
        assert_eq!(root.remove_session(id).unwrap(), 2);
        assert_eq!(fs::read_dir(dir.path().join("ids")).unwrap().count(), 0);
    }
}
