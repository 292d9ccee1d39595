//! Quotas of the kernel through the worker's own code: from the directory of a new session to the
//! release of its id. They need a file system with quotas: `conformance::vm` runs these tests on
//! one.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::Arc,
};

use codelia_policy::{DiskLimits, Ids};
use codelia_sys::{
    fs_identity::as_user,
    quota::{Amounts, QuotaKind, Quotas},
};
use codelia_tests::{available, eventually};
use codelia_types::{DiskMechanism, DiskUsage, Mode, SessionId};
use tempfile::TempDir;

use super::{Disk, DiskChoice, Quota, Target, choose};
use crate::{UidRange, workspace::root::SessionRoot};

const MIB: u64 = 1 << 20;
const LIMITS: DiskLimits = DiskLimits { bytes: 4 * MIB, inodes: 60 };
const LARGE: DiskLimits = DiskLimits { bytes: 64 * MIB, inodes: 10_000 };
/// Two sessions at a time.
const UIDS: UidRange = UidRange { base: 400_000, count: 2 };

struct Fixture {
    root: SessionRoot,
    disk: Arc<Disk>,
    quota: Arc<dyn Quota>,
    _place: TempDir,
}

/// A session that the worker has taken.
struct Session {
    id: SessionId,
    ids: Ids,
    workspace: PathBuf,
}

impl Fixture {
    /// `None` if the file system has no such quota.
    fn new(mechanism: DiskMechanism) -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), Permissions::from_mode(0o711)).unwrap();
        let root = SessionRoot::open(&place.path().join("root"), Some(UIDS)).unwrap();
        let chosen = choose(root.path(), DiskChoice::Only(mechanism), root.has_separate_users());
        let missing = chosen.as_ref().err().map(ToString::to_string);
        if !available("quota", missing.as_deref()) {
            return None;
        }
        let quota = chosen.unwrap().0.unwrap();
        let root = root.with_quota(Some(quota.clone()));
        let disk = Arc::new(Disk::new(root.path(), Some(quota.clone())));
        Some(Self { root, disk, quota, _place: place })
    }

    /// Takes a session as the worker does.
    fn session(&self, limits: DiskLimits) -> Session {
        self.take(SessionId::generate(), Mode::Native, limits)
    }

    fn take(&self, id: SessionId, mode: Mode, limits: DiskLimits) -> Session {
        self.root.open_session(id, limits).unwrap();
        let (_, ids) = self.root.create_session(id).unwrap();
        self.disk.attach(id, mode, ids, limits).unwrap();
        Session { id, ids, workspace: self.root.session(id) }
    }

    fn usage(&self, session: &Session) -> DiskUsage {
        let directory = session.workspace.parent().unwrap().to_owned();
        let target =
            Target { session: session.id, directory, mode: Mode::Native, ids: session.ids };
        self.quota.usage(&target).unwrap()
    }

    /// What the kernel has for the id of a session.
    fn limits(&self, session: &Session) -> Amounts {
        let kind = match self.quota.mechanism() {
            DiskMechanism::ProjectQuota => QuotaKind::Project,
            _ => QuotaKind::User,
        };
        Quotas::open(self.root.path(), kind).unwrap().limits(session.ids.uid).unwrap()
    }

    /// Gives a session up and removes it as the worker does.
    fn remove(&self, session: &Session) {
        self.disk.detach(session.id);
        self.root.remove_session(session.id).unwrap();
    }
}

impl Session {
    /// Does something as the user of its commands.
    fn as_user<T>(&self, work: impl FnOnce() -> T) -> T {
        as_user(self.ids.uid, self.ids.gid, work).unwrap()
    }

    /// Writes a file as far as possible, and removes it. Returns its size.
    fn write(&self, bytes: u64) -> u64 {
        let path = self.workspace.join("file");
        self.as_user(|| {
            let mut file = File::create(&path).unwrap();
            let mut written = 0;
            while written < bytes {
                match file.write(&[1; 1 << 16]) {
                    Ok(count) => written += u64::try_from(count).unwrap(),
                    Err(error) => {
                        assert!(is_full(&error), "{error}");
                        break;
                    }
                }
            }
            drop(file);
            fs::remove_file(&path).unwrap();
            written
        })
    }

    /// Creates empty files as far as possible. Returns their number.
    fn create_files(&self, count: u64) -> u64 {
        let create = |number: u64| match File::create(self.workspace.join(number.to_string())) {
            Ok(_) => true,
            Err(error) => {
                assert!(is_full(&error), "{error}");
                false
            }
        };
        self.as_user(|| (0..count).take_while(|number| create(*number)).count()).try_into().unwrap()
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::QuotaExceeded | io::ErrorKind::StorageFull)
}

async fn quota_limits_sessions(mechanism: DiskMechanism) {
    let Some(fixture) = Fixture::new(mechanism) else { return };
    let (limited, neighbour) = (fixture.session(LIMITS), fixture.session(LARGE));
    assert_eq!(fixture.disk.mechanism_of(limited.id), Some(mechanism));
    let written = limited.write(8 * MIB);
    assert!((3 * MIB..=LIMITS.bytes).contains(&written), "{written}");
    assert_eq!(neighbour.write(8 * MIB), 8 * MIB, "the control");

    // A run may have lower limits, and only while it goes.
    let lower = DiskLimits { bytes: MIB, ..LIMITS };
    let run = fixture.disk.watch_run(limited.id, lower).await.unwrap();
    let written = limited.write(8 * MIB);
    assert!(written <= MIB, "{written}");
    drop(run);
    let is_raised = || async { (limited.write(8 * MIB) > MIB).then_some(()) };
    eventually("the limit of the session holds again", is_raised).await;

    let files = limited.create_files(100);
    assert!((50..LIMITS.inodes).contains(&files), "{files}");
    assert_eq!(neighbour.create_files(100), 100, "the control");
    let usage = fixture.usage(&limited);
    assert!(
        usage.inodes > files && usage.inodes <= LIMITS.inodes && usage.bytes < MIB,
        "{usage:?}"
    );

    // What was removed is free, and the next session with the id has its own limits.
    assert_eq!(fixture.limits(&limited), Amounts { bytes: LIMITS.bytes, inodes: LIMITS.inodes });
    fixture.remove(&limited);
    assert_eq!(fixture.limits(&limited), Amounts::default(), "none");
    assert_eq!(fixture.usage(&limited), DiskUsage::default());
    let next = fixture.session(LARGE);
    assert_eq!(next.ids.uid, limited.ids.uid, "all others are taken");
    assert_eq!((next.write(8 * MIB), next.create_files(100)), (8 * MIB, 100));
    fixture.remove(&next);
    fixture.remove(&neighbour);
    assert_eq!(fixture.usage(&next), DiskUsage::default());
}

#[tokio::test]
async fn project_quota_limits_sessions() {
    quota_limits_sessions(DiskMechanism::ProjectQuota).await;
}

#[tokio::test]
async fn user_quota_limits_sessions() {
    quota_limits_sessions(DiskMechanism::UserQuota).await;
}

#[test]
fn session_that_could_leave_its_project_is_scanned() {
    let Some(mut fixture) = Fixture::new(DiskMechanism::ProjectQuota) else { return };
    let mechanism = |fixture: &Fixture, session: &Session| fixture.disk.mechanism_of(session.id);
    let logical = fixture.take(SessionId::generate(), Mode::Logical, LIMITS);
    assert_eq!(mechanism(&fixture, &logical), Some(DiskMechanism::Scan));
    fixture.remove(&logical);
    // A session that is older than the quota has files without a project.
    let id = SessionId::generate();
    fixture.root = fixture.root.with_quota(None);
    fixture.root.create_session(id).unwrap();
    fs::write(fixture.root.session(id).join("old"), "text").unwrap();
    fixture.root = fixture.root.with_quota(Some(fixture.quota.clone()));
    let old = fixture.take(id, Mode::Native, LIMITS);
    assert_eq!(mechanism(&fixture, &old), Some(DiskMechanism::Scan));
    let new = fixture.session(LIMITS);
    assert_eq!(mechanism(&fixture, &new), Some(DiskMechanism::ProjectQuota), "the control");
    fixture.remove(&old);
    fixture.remove(&new);
}
