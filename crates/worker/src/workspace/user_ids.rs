//! Who a session's processes are on the host: an id of its own from a range, where we may choose.
//!
//! The owner of a session's directory is the record of its id. A link named after the id, made
//! before, keeps two workers on one root from choosing the same.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink},
    path::{Path, PathBuf},
};

use codelia_policy::Ids;
use codelia_types::SessionId;

use crate::UidRange;

/// The ids of a session root.
#[derive(Debug)]
pub(crate) struct SessionIds {
    /// Holds a link for each id that is taken, to the session that has it.
    claims: PathBuf,
    /// `None` where all sessions have our own ids.
    range: Option<UidRange>,
}

impl SessionIds {
    /// Tries whether ids of the range can be given away.
    pub(crate) fn open(claims: PathBuf, range: Option<UidRange>) -> Self {
        let range = range.filter(|range| match try_range(&claims, *range) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, ?range, "sessions have no ids of their own");
                false
            }
        });
        Self { claims, range }
    }

    /// Whether sessions have ids of their own.
    pub(crate) fn are_own(&self) -> bool {
        self.range.is_some()
    }

    /// The ids of a session; the first time its directory is given to them.
    pub(crate) fn of(&self, session: SessionId, directory: &Path) -> io::Result<Ids> {
        let Some(range) = self.range else { return Ok(ours()) };
        let owner = fs::symlink_metadata(directory)?.uid();
        if range.contains(owner) {
            return Ok(Ids { uid: owner, gid: owner });
        }
        let uid = self.claim(session, range)?;
        lchown(directory, Some(uid), Some(uid))?;
        Ok(Ids { uid, gid: uid })
    }

    /// The session with this directory is about to be removed: what to pass to [`Self::free`] then.
    pub(crate) fn owner(&self, directory: &Path) -> Option<u32> {
        let range = self.range?;
        let owner = fs::symlink_metadata(directory).ok()?.uid();
        range.contains(owner).then_some(owner)
    }

    /// The session is gone with all its files: its id may be taken again.
    pub(crate) fn free(&self, session: SessionId, uid: u32) -> io::Result<()> {
        let claim = self.claims.join(uid.to_string());
        match fs::read_link(&claim) {
            Ok(holder) if holder == Path::new(&session.to_string()) => fs::remove_file(claim),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Frees the ids of sessions that are gone: whoever removed them did not come to its end.
    pub(crate) fn free_forgotten(&self, is_there: impl Fn(&Path) -> bool) -> io::Result<()> {
        if self.range.is_none() {
            return Ok(());
        }
        for claim in fs::read_dir(&self.claims)? {
            let claim = claim?.path();
            if !is_there(&fs::read_link(&claim)?) {
                fs::remove_file(claim)?;
            }
        }
        Ok(())
    }

    /// Begins at a place that depends on the session, so that the search is short.
    fn claim(&self, session: SessionId, range: UidRange) -> io::Result<u32> {
        let name = session.to_string();
        let first = session.0.as_u128() % u128::from(range.count);
        let places = (first..u128::from(range.count)).chain(0..first);
        for place in places.filter_map(|place| u32::try_from(place).ok()) {
            let uid = range.base + place;
            let claim = self.claims.join(uid.to_string());
            match symlink(&name, &claim) {
                Ok(()) => return Ok(uid),
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                // It was claimed, but the directory was not given away.
                Err(_) if fs::read_link(&claim).is_ok_and(|holder| holder == Path::new(&name)) => {
                    return Ok(uid);
                }
                Err(_) => {}
            }
        }
        Err(io::Error::new(ErrorKind::QuotaExceeded, "every id of the range is taken"))
    }
}

impl UidRange {
    fn contains(self, uid: u32) -> bool {
        uid.checked_sub(self.base).is_some_and(|place| place < self.count)
    }
}

fn ours() -> Ids {
    Ids { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

fn try_range(claims: &Path, range: UidRange) -> io::Result<()> {
    let most = range.count.checked_sub(1).and_then(|last| range.base.checked_add(last));
    let last = most.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the range has no ids"))?;
    fs::create_dir_all(claims)?;
    fs::set_permissions(claims, fs::Permissions::from_mode(0o700))?;
    for uid in [last, range.base] {
        lchown(claims, Some(uid), Some(uid))?;
    }
    let Ids { uid, gid } = ours();
    lchown(claims, Some(uid), Some(gid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: UidRange = UidRange { base: 300_000, count: 3 };

    fn open(dir: &Path) -> Option<SessionIds> {
        let ids = SessionIds::open(dir.join("ids"), Some(RANGE));
        if !ids.are_own() {
            println!("skipped: this user may not give files away");
        }
        ids.are_own().then_some(ids)
    }

    fn session(dir: &Path) -> (SessionId, PathBuf) {
        let id = SessionId::generate();
        let path = dir.join(id.to_string());
        fs::create_dir(&path).unwrap();
        (id, path)
    }

    #[test]
    fn sessions_have_different_ids_keep_them_and_give_them_back() {
        let dir = tempfile::tempdir().unwrap();
        let Some(ids) = open(dir.path()) else { return };
        let mut taken = Vec::new();
        for _ in 0..RANGE.count {
            let (id, path) = session(dir.path());
            let first = ids.of(id, &path).unwrap();
            assert_eq!(ids.of(id, &path).unwrap(), first, "the same the second time");
            assert_eq!(fs::metadata(&path).unwrap().uid(), first.uid);
            taken.push((id, path, first.uid));
        }
        let mut uids: Vec<u32> = taken.iter().map(|(_, _, uid)| *uid).collect();
        uids.sort_unstable();
        assert_eq!(uids, [300_000, 300_001, 300_002]);
        let (late, late_path) = session(dir.path());
        assert!(ids.of(late, &late_path).is_err(), "none is shared");
        let (id, path, uid) = taken.remove(1);
        assert_eq!(ids.owner(&path), Some(uid));
        ids.free(late, uid).unwrap();
        assert!(ids.of(late, &late_path).is_err(), "only its holder frees it");
        ids.free(id, uid).unwrap();
        assert_eq!(ids.of(late, &late_path).unwrap().uid, uid);
    }

    #[test]
    fn ids_of_sessions_that_are_gone_are_free_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let Some(ids) = open(dir.path()) else { return };
        let (kept, kept_path) = session(dir.path());
        let (gone, gone_path) = session(dir.path());
        ids.of(kept, &kept_path).unwrap();
        ids.of(gone, &gone_path).unwrap();
        fs::remove_dir(gone_path).unwrap();
        ids.free_forgotten(|name| dir.path().join(name).exists()).unwrap();
        let left: Vec<_> = fs::read_dir(dir.path().join("ids")).unwrap().collect();
        assert_eq!(left.len(), 1);
    }

    #[test]
    fn without_a_range_all_sessions_have_our_own_ids() {
        let dir = tempfile::tempdir().unwrap();
        let ids = SessionIds::open(dir.path().join("ids"), None);
        let (id, path) = session(dir.path());
        assert_eq!(ids.of(id, &path).unwrap(), ours());
        assert_eq!(ids.owner(&path), None);
    }
}
