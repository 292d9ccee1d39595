//! The user that a session's processes have on the host: a separate one from a range, if the worker
//! may change the owner of files.
//!
//! The owner of a session's directory records its user. A link named after the user id, made first,
//! keeps two workers on one root from choosing the same id.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink},
    path::{Path, PathBuf},
};

use codelia_policy::Ids;
use codelia_types::SessionId;

use crate::UidRange;

/// The users of the sessions in a root.
#[derive(Debug)]
pub(crate) struct SessionUsers {
    /// Holds a link for each taken id, to the session that has it.
    claims: PathBuf,
    /// `None` if all sessions have the worker's own user.
    range: Option<UidRange>,
}

impl SessionUsers {
    /// Checks whether files can be given to users of the range.
    pub(crate) fn open(claims: PathBuf, range: Option<UidRange>) -> Self {
        let range = range.filter(|range| match check_range(&claims, *range) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, ?range, "sessions share the user of the worker");
                false
            }
        });
        Self { claims, range }
    }

    /// Whether each session has its own user.
    pub(crate) fn are_separate(&self) -> bool {
        self.range.is_some()
    }

    /// The user of a session. The first call makes it the owner of the directory.
    pub(crate) fn assign(&self, session: SessionId, directory: &Path) -> io::Result<Ids> {
        let Some(range) = self.range else { return Ok(own_ids()) };
        let owner = fs::symlink_metadata(directory)?.uid();
        if range.contains(owner) {
            return Ok(Ids { uid: owner, gid: owner });
        }
        let uid = self.claim(session, range)?;
        lchown(directory, Some(uid), Some(uid))?;
        Ok(Ids { uid, gid: uid })
    }

    /// The user of the session with this directory, to pass to [`Self::free`] after its removal.
    pub(crate) fn owner(&self, directory: &Path) -> Option<u32> {
        let range = self.range?;
        let owner = fs::symlink_metadata(directory).ok()?.uid();
        range.contains(owner).then_some(owner)
    }

    /// Frees the id of a session that was removed with all its files.
    pub(crate) fn free(&self, session: SessionId, uid: u32) -> io::Result<()> {
        let claim = self.claims.join(uid.to_string());
        match fs::read_link(&claim) {
            Ok(holder) if holder == Path::new(&session.to_string()) => fs::remove_file(claim),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Frees the ids of sessions that no longer exist: their removal was interrupted.
    pub(crate) fn free_unused(&self, exists: impl Fn(&Path) -> bool) -> io::Result<()> {
        if self.range.is_none() {
            return Ok(());
        }
        for claim in fs::read_dir(&self.claims)? {
            let claim = claim?.path();
            if !exists(&fs::read_link(&claim)?) {
                fs::remove_file(claim)?;
            }
        }
        Ok(())
    }

    /// Starts at an offset that depends on the session, so that the search is short.
    fn claim(&self, session: SessionId, range: UidRange) -> io::Result<u32> {
        let name = session.to_string();
        let first = session.0.as_u128() % u128::from(range.count);
        let offsets = (first..u128::from(range.count)).chain(0..first);
        for offset in offsets.filter_map(|offset| u32::try_from(offset).ok()) {
            let uid = range.base + offset;
            let claim = self.claims.join(uid.to_string());
            match symlink(&name, &claim) {
                Ok(()) => return Ok(uid),
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                // Claimed before, but the owner of the directory was not changed.
                Err(_) if fs::read_link(&claim).is_ok_and(|holder| holder == Path::new(&name)) => {
                    return Ok(uid);
                }
                Err(_) => {}
            }
        }
        Err(io::Error::new(ErrorKind::QuotaExceeded, "all user ids of the range are taken"))
    }
}

impl UidRange {
    fn contains(self, uid: u32) -> bool {
        uid.checked_sub(self.base).is_some_and(|offset| offset < self.count)
    }
}

fn own_ids() -> Ids {
    Ids { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

fn check_range(claims: &Path, range: UidRange) -> io::Result<()> {
    let last = range.count.checked_sub(1).and_then(|offset| range.base.checked_add(offset));
    let last =
        last.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the range of user ids is empty"))?;
    fs::create_dir_all(claims)?;
    fs::set_permissions(claims, fs::Permissions::from_mode(0o700))?;
    for uid in [last, range.base] {
        lchown(claims, Some(uid), Some(uid))?;
    }
    let Ids { uid, gid } = own_ids();
    lchown(claims, Some(uid), Some(gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: UidRange = UidRange { base: 300_000, count: 3 };

    fn open(dir: &Path) -> Option<SessionUsers> {
        let users = SessionUsers::open(dir.join("ids"), Some(RANGE));
        let missing = (!users.are_separate()).then_some("only root can change the owner of files");
        codelia_tests::available("root", missing);
        users.are_separate().then_some(users)
    }

    fn session(dir: &Path) -> (SessionId, PathBuf) {
        let id = SessionId::generate();
        let path = dir.join(id.to_string());
        fs::create_dir(&path).unwrap();
        (id, path)
    }

    #[test]
    fn sessions_keep_distinct_users_until_freed() {
        let dir = tempfile::tempdir().unwrap();
        let Some(users) = open(dir.path()) else { return };
        let mut taken = Vec::new();
        for _ in 0..RANGE.count {
            let (id, path) = session(dir.path());
            let first = users.assign(id, &path).unwrap();
            assert_eq!(users.assign(id, &path).unwrap(), first, "the second call returns the same");
            assert_eq!(fs::metadata(&path).unwrap().uid(), first.uid);
            taken.push((id, path, first.uid));
        }
        let mut uids: Vec<u32> = taken.iter().map(|(_, _, uid)| *uid).collect();
        uids.sort_unstable();
        assert_eq!(uids, [300_000, 300_001, 300_002]);
        let (late, late_path) = session(dir.path());
        assert!(users.assign(late, &late_path).is_err(), "no id is shared");
        let (id, path, uid) = taken.remove(1);
        assert_eq!(users.owner(&path), Some(uid));
        users.free(late, uid).unwrap();
        assert!(users.assign(late, &late_path).is_err(), "only its session frees it");
        users.free(id, uid).unwrap();
        assert_eq!(users.assign(late, &late_path).unwrap().uid, uid);
    }

    #[test]
    fn ids_of_removed_sessions_are_freed() {
        let dir = tempfile::tempdir().unwrap();
        let Some(users) = open(dir.path()) else { return };
        let (kept, kept_path) = session(dir.path());
        let (gone, gone_path) = session(dir.path());
        users.assign(kept, &kept_path).unwrap();
        users.assign(gone, &gone_path).unwrap();
        fs::remove_dir(gone_path).unwrap();
        users.free_unused(|name| dir.path().join(name).exists()).unwrap();
        let left: Vec<_> = fs::read_dir(dir.path().join("ids")).unwrap().collect();
        assert_eq!(left.len(), 1);
    }

    #[test]
    fn sessions_share_worker_user_without_range() {
        let dir = tempfile::tempdir().unwrap();
        let users = SessionUsers::open(dir.path().join("ids"), None);
        let (id, path) = session(dir.path());
        assert_eq!(users.assign(id, &path).unwrap(), own_ids());
        assert_eq!(users.owner(&path), None);
    }
}
