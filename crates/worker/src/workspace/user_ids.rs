//! The user that a session's processes have on the host: a separate one from a range, if the worker
//! may change the owner of files.
//!
//! The owner of a session's directory records its user. A link named after the user id, made first,
//! keeps two workers on one root from choosing the same id. Ids are taken in turn, so that one is
//! used again only after all others, and only if no file of its former session can be left.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind, Read, Seek, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, lchown, symlink},
    },
    path::{Path, PathBuf},
};

use codelia_policy::Ids;
use codelia_types::SessionId;
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, flock};

use crate::{
    UidRange,
    file_work::{if_exists, unless_exists},
};

/// Ids that a worker takes from the stored cursor together. A restart skips the rest of them.
const BATCH: u32 = 64;
/// Files that are looked at before ids are used again. With more, none is.
const MAX_SCANNED: usize = 1_000_000;
/// Ends each path in a file of [`SessionUsers::shared`].
const PATH_END: u8 = 0;

/// The users of the sessions in a root.
#[derive(Debug)]
pub(crate) struct SessionUsers {
    /// Holds a link for each taken id, to the session that has it.
    claims: PathBuf,
    /// Holds a file for each id whose files may be outside of its session's directory, with the
    /// paths there.
    shared: PathBuf,
    /// Holds the offset of the next id that no worker took.
    cursor: PathBuf,
    batch: Mutex<Batch>,
    /// `None` if all sessions have the worker's own user.
    range: Option<UidRange>,
}

/// Offsets in the range that this worker took and did not use yet.
#[derive(Debug, Default)]
struct Batch {
    next: u32,
    left: u32,
}

impl SessionUsers {
    /// Checks whether files can be given to users of the range.
    pub(crate) fn open(root: &Path, range: Option<UidRange>) -> Self {
        let claims = root.join("ids");
        let range = range.filter(|range| match check_range(&claims, *range) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, %range, "sessions share the user of the worker");
                false
            }
        });
        let shared = root.join("shared-ids");
        let cursor = root.join("next-id");
        Self { claims, shared, cursor, batch: Mutex::default(), range }
    }

    /// Whether each session has its own user.
    pub(crate) fn are_separate(&self) -> bool {
        self.range.is_some()
    }

    /// The user of a session. The first call makes it the owner of the directory.
    pub(crate) fn assign(&self, session: SessionId, directory: &Path) -> io::Result<Ids> {
        let Some(range) = self.range else { return Ok(own_ids()) };
        let owner = fs::symlink_metadata(directory)?.uid();
        // An earlier range may have been another one.
        if range.contains(owner) || self.is_claimed_by(session, owner) {
            return Ok(Ids { uid: owner, gid: owner });
        }
        let claimed = match self.claim(session, range)? {
            Some(uid) => Some(uid),
            None => {
                self.reclaim()?;
                self.claim(session, range)?
            }
        };
        let uid = claimed.ok_or_else(|| {
            let message = format!(
                "all user ids {range} are taken (raise sandbox.uid_count, or remove files of former sessions \
                 from the paths that {} lists)",
                self.shared.display()
            );
            io::Error::new(ErrorKind::QuotaExceeded, message)
        })?;
        lchown(directory, Some(uid), Some(uid))?;
        Ok(Ids { uid, gid: uid })
    }

    /// The user of the session whose group this directory has, to pass to [`Self::free`] after its
    /// removal.
    pub(crate) fn owner(&self, directory: &Path) -> Option<u32> {
        self.range?;
        fs::symlink_metadata(directory).ok().map(|found| found.gid())
    }

    /// Frees the id of a session that was removed with all its files. An id with files elsewhere
    /// stays taken.
    pub(crate) fn free(&self, session: SessionId, uid: u32) -> io::Result<()> {
        if !self.is_claimed_by(session, uid) || self.is_shared(uid)? {
            return Ok(());
        }
        if_exists(fs::remove_file(self.claims.join(uid.to_string()))).map(drop)
    }

    /// Frees the ids of sessions that no longer exist: their removal was interrupted.
    pub(crate) fn free_unused(&self, exists: impl Fn(&Path) -> bool) -> io::Result<()> {
        if self.range.is_none() {
            return Ok(());
        }
        for claim in fs::read_dir(&self.claims)? {
            let claim = claim?;
            let uid = claim.file_name().to_string_lossy().parse::<u32>();
            if !exists(&fs::read_link(claim.path())?)
                && !uid.map_or(Ok(true), |uid| self.is_shared(uid))?
            {
                if_exists(fs::remove_file(claim.path()))?;
            }
        }
        Ok(())
    }

    /// Records that the user may leave files in these paths, which outlive its session.
    pub(crate) fn share(&self, uid: u32, paths: &[PathBuf]) -> io::Result<()> {
        if self.range.is_none() || paths.is_empty() {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.shared)?;
        let file = self.shared.join(uid.to_string());
        let known = self.shared_paths(&file)?;
        let mut text = Vec::new();
        for path in paths.iter().filter(|path| !known.contains(path)) {
            text.extend_from_slice(path.as_os_str().as_bytes());
            text.push(PATH_END);
        }
        if text.is_empty() {
            return Ok(());
        }
        let mut file = File::options().append(true).create(true).mode(0o600).open(file)?;
        file.write_all(&text)?;
        file.sync_all()
    }

    fn shared_paths(&self, file: &Path) -> io::Result<Vec<PathBuf>> {
        let text = if_exists(fs::read(file))?.unwrap_or_default();
        let paths = text.split(|byte| *byte == PATH_END).filter(|path| !path.is_empty());
        Ok(paths.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect())
    }

    fn is_shared(&self, uid: u32) -> io::Result<bool> {
        self.shared.join(uid.to_string()).try_exists()
    }

    fn is_claimed_by(&self, session: SessionId, uid: u32) -> bool {
        let claim = fs::read_link(self.claims.join(uid.to_string()));
        claim.is_ok_and(|holder| holder == Path::new(&session.to_string()))
    }

    /// Claims the next free id; `None` if all are taken.
    fn claim(&self, session: SessionId, range: UidRange) -> io::Result<Option<u32>> {
        let name = session.to_string();
        for _ in 0..range.count {
            let uid = range.base + self.next_offset(range)?;
            if unless_exists(symlink(&name, self.claims.join(uid.to_string())))? {
                return Ok(Some(uid));
            }
        }
        Ok(None)
    }

    /// The offset after the last one that any worker on this root took, now or before a restart.
    fn next_offset(&self, range: UidRange) -> io::Result<u32> {
        let mut batch = self.batch.lock();
        if batch.left == 0 {
            *batch = self.take_batch(range)?;
        }
        let offset = batch.next % range.count;
        (batch.next, batch.left) = (offset + 1, batch.left - 1);
        Ok(offset)
    }

    /// Stored before it is used, so that a crash repeats no id.
    fn take_batch(&self, range: UidRange) -> io::Result<Batch> {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&self.cursor)?;
        flock(&file, FlockOperation::LockExclusive)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let next = text.trim().parse::<u32>().unwrap_or(0) % range.count;
        let left = BATCH.min(range.count);
        let after = (u64::from(next) + u64::from(left)) % u64::from(range.count);
        file.rewind()?;
        // A fixed width: a shorter number would leave digits of a longer one.
        write!(file, "{after:010}")?;
        file.sync_all()?;
        Ok(Batch { next, left })
    }

    /// Frees the ids of former sessions that have no file left in the paths they could write to.
    fn reclaim(&self) -> io::Result<()> {
        let mut candidates = BTreeMap::new();
        let Some(entries) = if_exists(fs::read_dir(&self.shared))? else { return Ok(()) };
        for entry in entries {
            let entry = entry?;
            let Ok(uid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let claim = fs::read_link(self.claims.join(uid.to_string()));
            // The directory of a session is a sibling of the claims, and so is the trash.
            let root = self.claims.parent().unwrap_or(&self.claims);
            let is_live = claim.is_ok_and(|name| {
                ["sessions", "trash"].iter().any(|place| root.join(place).join(&name).exists())
            });
            if !is_live {
                candidates.insert(uid, self.shared_paths(&entry.path())?);
            }
        }
        let trees: BTreeSet<_> = candidates.values().flatten().cloned().collect();
        let found = owners_below(trees.into_iter().collect())?;
        for uid in candidates.into_keys().filter(|uid| !found.contains(uid)) {
            if_exists(fs::remove_file(self.claims.join(uid.to_string())))?;
            if_exists(fs::remove_file(self.shared.join(uid.to_string())))?;
        }
        Ok(())
    }
}

/// The owners of all files below these paths. Follows no link.
fn owners_below(mut paths: Vec<PathBuf>) -> io::Result<BTreeSet<u32>> {
    let mut owners = BTreeSet::new();
    let mut scanned = 0;
    while let Some(path) = paths.pop() {
        scanned += 1;
        if scanned > MAX_SCANNED {
            let message = "too many files in shared paths to look for files of former sessions";
            return Err(io::Error::new(ErrorKind::QuotaExceeded, message));
        }
        let found = fs::symlink_metadata(&path)?;
        owners.insert(found.uid());
        if found.is_dir() {
            for entry in fs::read_dir(&path)? {
                paths.push(entry?.path());
            }
        }
    }
    Ok(owners)
}

fn own_ids() -> Ids {
    Ids { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

fn check_range(claims: &Path, range: UidRange) -> io::Result<()> {
    let last = range.last();
    let last = last
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the range of user ids is empty"))?;
    DirBuilder::new().recursive(true).mode(0o700).create(claims)?;
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
        let users = SessionUsers::open(dir, Some(RANGE));
        let missing = (!users.are_separate()).then_some("only root can change the owner of files");
        codelia_tests::available("root", missing);
        users.are_separate().then_some(users)
    }

    fn session(dir: &Path) -> (SessionId, PathBuf) {
        let id = SessionId::generate();
        let path = dir.join("sessions").join(id.to_string());
        fs::create_dir_all(&path).unwrap();
        (id, path)
    }

    /// Creates a session and returns its user.
    fn assign(users: &SessionUsers, dir: &Path) -> (SessionId, PathBuf, u32) {
        let (id, path) = session(dir);
        let uid = users.assign(id, &path).unwrap().uid;
        (id, path, uid)
    }

    fn remove(users: &SessionUsers, (id, path, uid): (SessionId, PathBuf, u32)) {
        fs::remove_dir_all(path).unwrap();
        users.free(id, uid).unwrap();
    }

    #[test]
    fn sessions_keep_distinct_users_until_freed() {
        let dir = tempfile::tempdir().unwrap();
        let Some(users) = open(dir.path()) else { return };
        let mut taken = Vec::new();
        for _ in 0..RANGE.count {
            let (id, path, uid) = assign(&users, dir.path());
            assert_eq!(
                users.assign(id, &path).unwrap().uid,
                uid,
                "the second call returns the same"
            );
            assert_eq!(fs::metadata(&path).unwrap().uid(), uid);
            taken.push((id, path, uid));
        }
        let uids: Vec<u32> = taken.iter().map(|(_, _, uid)| *uid).collect();
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
    fn id_is_reused_only_after_all_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut seen = Vec::new();
        for _ in 0..2 * RANGE.count {
            // A restart does not start again from the first id.
            let users =
                SessionUsers::open(dir.path(), Some(UidRange { base: 300_000, count: 6 * BATCH }));
            let missing =
                (!users.are_separate()).then_some("only root can change the owner of files");
            if !codelia_tests::available("root", missing) {
                return;
            }
            for _ in 0..2 {
                let taken = assign(&users, dir.path());
                seen.push(taken.2);
                remove(&users, taken);
            }
        }
        let distinct: BTreeSet<_> = seen.iter().collect();
        assert_eq!(distinct.len(), seen.len(), "{seen:?}");
    }

    #[test]
    fn id_with_files_in_shared_path_is_not_reused() {
        let dir = tempfile::tempdir().unwrap();
        let shared = tempfile::tempdir().unwrap();
        let Some(users) = open(dir.path()) else { return };
        let left = shared.path().join("deep/left");
        fs::create_dir(shared.path().join("deep")).unwrap();
        let first = assign(&users, dir.path());
        let leaver = first.2;
        users.share(leaver, &[shared.path().to_owned()]).unwrap();
        fs::write(&left, "").unwrap();
        lchown(&left, Some(leaver), None).unwrap();
        remove(&users, first);
        // A restart must not free it either.
        let users = open(dir.path()).unwrap();
        users.free_unused(|name| dir.path().join("sessions").join(name).exists()).unwrap();
        for _ in 0..3 * RANGE.count {
            let next = assign(&users, dir.path());
            assert_ne!(next.2, leaver, "its file would be handed on");
            remove(&users, next);
        }
        let held: Vec<_> = (1..RANGE.count).map(|_| assign(&users, dir.path())).collect();
        let (late, late_path) = session(dir.path());
        let refused = users.assign(late, &late_path).unwrap_err().to_string();
        assert!(refused.contains("shared-ids"), "{refused}");
        fs::remove_file(&left).unwrap();
        assert_eq!(
            users.assign(late, &late_path).unwrap().uid,
            leaver,
            "the control: nothing is left"
        );
        assert_eq!(held.len(), 2);
    }

    #[test]
    fn ids_of_removed_sessions_are_freed() {
        let dir = tempfile::tempdir().unwrap();
        let Some(users) = open(dir.path()) else { return };
        assign(&users, dir.path());
        let (_, gone_path, _) = assign(&users, dir.path());
        fs::remove_dir(gone_path).unwrap();
        users.free_unused(|name| dir.path().join("sessions").join(name).exists()).unwrap();
        let left: Vec<_> = fs::read_dir(dir.path().join("ids")).unwrap().collect();
        assert_eq!(left.len(), 1);
    }

    #[test]
    fn session_keeps_user_of_earlier_range() {
        let dir = tempfile::tempdir().unwrap();
        let Some(users) = open(dir.path()) else { return };
        let (id, path, uid) = assign(&users, dir.path());
        let users = SessionUsers::open(dir.path(), Some(UidRange { base: 310_000, count: 3 }));
        assert_eq!(users.assign(id, &path).unwrap().uid, uid);
        assert_eq!(
            assign(&users, dir.path()).2,
            310_000,
            "the control: a new session has a new one"
        );
        remove(&users, (id, path, uid));
        assert!(!dir.path().join("ids").join(uid.to_string()).is_symlink());
    }

    #[test]
    fn sessions_share_worker_user_without_range() {
        let dir = tempfile::tempdir().unwrap();
        let users = SessionUsers::open(dir.path(), None);
        let (id, path) = session(dir.path());
        assert_eq!(users.assign(id, &path).unwrap(), own_ids());
        assert_eq!(users.owner(&path), None);
    }
}
