//! Usage and limits of the files of this worker's sessions.
//!
//! Where the kernel has no quota for a session, the worker measures its directory ([`scan`]) and
//! stops runs that exceed a limit ([`monitor`]). File calls are checked in every case: the worker's
//! own writes may be exempt from quotas.

mod account;
mod choice;
mod error;
mod image;
mod kernel_quota;
mod missing;
mod monitor;
mod open_files;
mod quota;
#[cfg(test)]
mod quota_tests;
mod run_watch;
mod scan;
mod space;
mod watched_run;

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use codelia_policy::{DiskLimits, Ids, Limit};
use codelia_telemetry::DiskCause;
use codelia_types::{DiskMechanism, DiskUsage, Mode, SessionId};
use parking_lot::{Condvar, Mutex};
use tokio::{runtime::Handle, sync::Notify};

pub use self::choice::{DiskChoice, DiskError, DiskReport, check_disk};
pub use self::missing::Missing;
pub use self::space::root_space;
use self::{
    account::{Account, Begun},
    run_watch::RunWatch,
    scan::{Found, Progress},
};
pub(crate) use self::{
    choice::choose,
    error::{DiskFull, NoRoom},
    quota::{Quota, Target},
    scan::measure,
    space::Space,
    watched_run::WatchedRun,
};
use crate::file_work::blocking;

/// How long a file call waits for a measurement of its session.
const CALL_MEASURE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the first measurement of a session may delay its first run.
const ATTACH_MEASURE_TIME: Duration = Duration::from_millis(10);

/// Usage and limits of the files of the sessions that this worker holds.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The directory of session directories.
    sessions: PathBuf,
    /// `None` if directories are scanned.
    quota: Option<Arc<dyn Quota>>,
    accounts: Mutex<HashMap<SessionId, Account>>,
    /// Rises with each change of what [`Disk::usages`] returns.
    version: AtomicU64,
    /// There may be something to measure.
    changed: Notify,
    /// A measurement has ended, or a session is forgotten.
    ended: Condvar,
}

impl Disk {
    /// `root` is the session root. Without a quota of the kernel, directories are scanned.
    pub(crate) fn new(root: &Path, quota: Option<Arc<dyn Quota>>) -> Self {
        let sessions = root.join("sessions");
        Self {
            sessions,
            quota,
            accounts: Mutex::default(),
            version: AtomicU64::new(0),
            changed: Notify::new(),
            ended: Condvar::new(),
        }
    }

    /// The mechanism that limits most sessions here. Some may be scanned although there is a quota.
    pub(crate) fn mechanism(&self) -> DiskMechanism {
        self.quota.as_ref().map_or(DiskMechanism::Scan, |quota| quota.mechanism())
    }

    /// Blocking. Begins to limit a session that this worker takes, before anything uses its
    /// directory.
    pub(crate) fn attach(
        &self,
        session: SessionId,
        mode: Mode,
        ids: Ids,
        limits: DiskLimits,
    ) -> io::Result<()> {
        let directory = self.sessions.join(session.to_string());
        let target = Target { session, directory, mode, ids };
        let quota = self.quota.clone().filter(|quota| quota.covers(&target));
        if let Some(quota) = &quota {
            quota.set(&target, limits)?;
        }
        self.accounts.lock().insert(session, Account::new(target, quota, limits));
        self.measure_briefly(session);
        self.usages_changed();
        self.changed.notify_one();
        Ok(())
    }

    /// Measures a session unless that takes long, so that its first run starts from what is known.
    fn measure_briefly(&self, session: SessionId) {
        let began = Instant::now();
        let found = match self.begin(session, monitor::free_bytes(self)) {
            Some(Ok(Begun::Known(found))) => Some(found),
            Some(Ok(Begun::Walk(mut walk))) => match walk.advance(began + ATTACH_MEASURE_TIME) {
                Ok(Progress::Done(found)) => Some(found),
                Ok(Progress::Unfinished) | Err(_) => None,
            },
            Some(Err(_)) | None => None,
        };
        match (found, self.accounts.lock().get_mut(&session)) {
            (Some(found), Some(account)) => {
                account.measured(found, began.elapsed(), Instant::now())
            }
            // The monitor does it.
            (None, Some(account)) => account.give_up(),
            (_, None) => {}
        }
    }

    /// Forgets a session whose lease is given up or whose directory is removed.
    pub(crate) fn detach(&self, session: SessionId) {
        let account = self.accounts.lock().remove(&session);
        if let Some(account) = account {
            account.forget();
        }
        self.usages_changed();
        self.ended.notify_all();
    }

    /// Forgets all sessions.
    pub(crate) fn detach_all(&self) {
        let accounts = std::mem::take(&mut *self.accounts.lock());
        accounts.into_values().for_each(Account::forget);
        self.usages_changed();
        self.ended.notify_all();
    }

    /// As long as this stays the same, [`Disk::usages`] does, too.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// After the change.
    fn usages_changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The last known usage of all sessions that were measured.
    pub(crate) fn usages(&self) -> Vec<(SessionId, DiskUsage, DiskLimits)> {
        let known = |(id, account): (&SessionId, &Account)| {
            account.usage().map(|(usage, limits)| (*id, usage, limits))
        };
        self.accounts.lock().iter().filter_map(known).collect()
    }

    /// Does something with what is known about a session; `None` if it is not held.
    fn with<T>(&self, session: SessionId, work: impl FnOnce(&mut Account) -> T) -> Option<T> {
        self.accounts.lock().get_mut(&session).map(work)
    }

    /// The mechanism that limits a session that is held.
    pub(crate) fn mechanism_of(&self, session: SessionId) -> Option<DiskMechanism> {
        self.with(session, |account| account.mechanism())
    }

    /// Blocking. Refuses if this much more would exceed a limit of the session; else counts it
    /// until the next measurement.
    pub(crate) fn reserve(&self, session: SessionId, more: DiskUsage) -> Result<(), NoRoom> {
        if self.with(session, |account| account.is_measured()) == Some(false) {
            self.await_measurement(session);
        }
        // A session that is not held any more: the call fails when it checks that.
        let reserve = || self.with(session, |account| account.reserve(more)).unwrap_or(Ok(()));
        let Err(no_room) = reserve() else { return Ok(()) };
        if self.with(session, |account| account.is_stale()) != Some(true) {
            return Err(no_room);
        }
        self.await_measurement(session);
        reserve()
    }

    /// Bytes that were reserved are in a file without a name, which no measurement finds.
    pub(crate) fn hold_unnamed(&self, session: SessionId, bytes: u64) {
        self.with(session, |account| account.hold_unnamed(bytes));
    }

    /// The file of these bytes has a name now, or is gone.
    pub(crate) fn release_unnamed(&self, session: SessionId, bytes: u64, has_name: bool) {
        self.with(session, |account| account.release_unnamed(bytes, has_name));
    }

    /// A file call has changed the session: what it uses is measured again.
    pub(crate) fn session_changed(&self, session: SessionId) {
        self.with(session, Account::set_stale);
        self.changed.notify_one();
    }

    /// Watches a run that is about to start, with limits that may be lower than those of its
    /// session.
    pub(crate) async fn watch_run(
        self: &Arc<Self>,
        session: SessionId,
        limits: DiskLimits,
    ) -> io::Result<WatchedRun> {
        let added = self.with(session, |account| {
            let before = account.lowest_limits();
            let run = account.add_run(limits);
            (run, account.quota.is_some() && account.lowest_limits() != before)
        });
        // Without it, the lease is gone: the run is about to be fenced.
        let (run, is_limited_by_kernel) =
            added.unwrap_or_else(|| (Arc::new(RunWatch::new(limits, None)), false));
        self.changed.notify_one();
        let watched = WatchedRun { disk: self.clone(), session, run };
        if is_limited_by_kernel {
            let disk = self.clone();
            blocking(move || disk.set_limits(session)).await?;
        }
        Ok(watched)
    }

    /// Fails if the session exceeds a limit so far that no run may start in it.
    pub(crate) fn check_start(&self, session: SessionId) -> Result<(), DiskFull> {
        self.with(session, |account| account.over_hard_limit()).flatten().map_or(Ok(()), Err)
    }

    /// Stops all runs of a session as `limit`, such as when its tenant has no room left.
    pub(crate) fn stop_runs(&self, session: SessionId, limit: Limit, cause: DiskCause) {
        self.with(session, |account| account.stop_runs(limit, cause));
    }

    fn end_run(self: &Arc<Self>, session: SessionId, run: &Arc<RunWatch>) {
        let is_raised = self.with(session, |account| {
            let before = account.lowest_limits();
            account.remove_run(run);
            account.quota.is_some() && account.lowest_limits() != before
        });
        self.changed.notify_one();
        if is_raised == Some(true)
            && let Ok(runtime) = Handle::try_current()
        {
            let disk = self.clone();
            runtime.spawn_blocking(move || {
                if let Err(error) = disk.set_limits(session) {
                    tracing::error!(%error, %session, "cannot set the disk limits of a session");
                }
            });
        }
    }

    /// Sets the limits of a session and its runs in the kernel.
    fn set_limits(&self, session: SessionId) -> io::Result<()> {
        let current = || {
            self.with(session, |account| {
                let Account { setting, quota, target, .. } = account;
                (setting.clone(), quota.clone(), target.clone(), account.lowest_limits())
            })
        };
        let Some((setting, ..)) = current() else { return Ok(()) };
        let _one_at_a_time = setting.lock();
        match current() {
            Some((_, Some(quota), target, limits)) => quota.set(&target, limits),
            Some((_, None, ..)) | None => Ok(()),
        }
    }

    /// Waits until a session was measured that begins from now on. The monitor does it: this thread
    /// may have the rights of the session's user.
    fn await_measurement(&self, session: SessionId) {
        let deadline = Instant::now() + CALL_MEASURE_TIMEOUT;
        let mut accounts = self.accounts.lock();
        let Some(wanted) = accounts.get_mut(&session).map(Account::request_measurement) else {
            return;
        };
        self.changed.notify_one();
        while accounts.get(&session).is_some_and(|account| !account.has_measured(wanted)) {
            if self.ended.wait_until(&mut accounts, deadline).timed_out() {
                return;
            }
        }
    }

    /// Sessions whose measurement is due, at most `max`: those with runs first, the longest overdue
    /// first.
    fn due(&self, max: usize, free_bytes: u64) -> Vec<SessionId> {
        let now = Instant::now();
        let mut accounts = self.accounts.lock();
        let mut due: Vec<_> = accounts
            .iter_mut()
            .filter_map(|(id, account)| {
                account.note_free_bytes(free_bytes);
                let due_at = account.due_at(now).filter(|due_at| *due_at <= now)?;
                Some((!account.has_runs(), due_at, *id))
            })
            .collect();
        drop(accounts);
        due.sort_unstable();
        due.into_iter().take(max).map(|(.., id)| id).collect()
    }

    /// How long until a measurement is due; `None` if nothing needs one.
    fn next_due(&self) -> Option<Duration> {
        let now = Instant::now();
        let next = self.accounts.lock().values().filter_map(|account| account.due_at(now)).min()?;
        Some(next.saturating_duration_since(now))
    }

    /// Whether there are runs that only this worker can stop.
    fn has_scanned_runs(&self) -> bool {
        self.accounts.lock().values().any(|account| account.quota.is_none() && account.has_runs())
    }

    /// Begins to measure a session; `None` if it is not held.
    fn begin(&self, session: SessionId, free_bytes: u64) -> Option<io::Result<Begun>> {
        let beginning = self.with(session, |account| account.begin(free_bytes))?;
        Some(beginning.measure())
    }

    fn measured(&self, session: SessionId, found: Found, cost: Duration) {
        self.with(session, |account| account.measured(found, cost, Instant::now()));
        self.usages_changed();
        self.ended.notify_all();
    }

    fn failed(&self, session: SessionId, cost: Duration) {
        self.with(session, |account| account.failed(cost, Instant::now()));
        self.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::task::spawn_blocking;

    use super::*;

    const MIB: u64 = 1 << 20;
    const LIMITS: DiskLimits = DiskLimits { bytes: 4 * MIB, inodes: 20 };

    struct Fixture {
        disk: Arc<Disk>,
        session: SessionId,
        workspace: PathBuf,
        _root: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let session = SessionId::generate();
            let workspace =
                root.path().join("sessions").join(session.to_string()).join("workspace");
            fs::create_dir_all(&workspace).unwrap();
            let disk = Arc::new(Disk::new(root.path(), None));
            disk.attach(session, Mode::Logical, Ids { uid: 0, gid: 0 }, LIMITS).unwrap();
            Self { disk, session, workspace, _root: root }
        }

        fn write(&self, name: &str, bytes: u64) {
            fs::write(self.workspace.join(name), vec![1; usize::try_from(bytes).unwrap()]).unwrap();
        }

        async fn reserve(&self, bytes: u64, inodes: u64) -> Result<(), NoRoom> {
            let (disk, session) = (self.disk.clone(), self.session);
            spawn_blocking(move || disk.reserve(session, DiskUsage { bytes, inodes }))
                .await
                .unwrap()
        }

        /// Waits until the session is measured again.
        async fn measured(&self) {
            let (disk, session) = (self.disk.clone(), self.session);
            spawn_blocking(move || disk.await_measurement(session)).await.unwrap();
        }

        /// Does something while the monitor runs.
        async fn monitored<T>(&self, work: impl Future<Output = T>) -> T {
            tokio::select! {
                () = self.disk.clone().monitor() => unreachable!("it never ends"),
                done = work => done,
            }
        }
    }

    #[tokio::test]
    async fn reservations_stay_within_limits() {
        let fixture = Fixture::new();
        fixture
            .monitored(async {
                fixture.reserve(3 * MIB, 10).await.unwrap();
                // Nothing was written: the next measurement frees what was reserved.
                fixture.reserve(3 * MIB, 10).await.unwrap();
                fixture.write("file", 3 * MIB);
                fixture.disk.session_changed(fixture.session);
                let refused = fixture.reserve(3 * MIB, 0).await.unwrap_err();
                let NoRoom::Full(full) = refused else { panic!("{refused:?}") };
                assert_eq!((full.limit, full.max), (Limit::DiskBytes, 4 * MIB));
                assert!(full.used >= 3 * MIB, "{full:?}");
                let refused = fixture.reserve(0, 30).await.unwrap_err();
                assert!(
                    matches!(refused, NoRoom::Full(DiskFull { limit: Limit::Inodes, .. })),
                    "{refused:?}"
                );
                fs::remove_file(fixture.workspace.join("file")).unwrap();
                fixture.disk.session_changed(fixture.session);
                fixture.reserve(3 * MIB, 10).await.unwrap();
            })
            .await;
        fixture.disk.detach(fixture.session);
        assert!(fixture.disk.usages().is_empty());
        fixture.reserve(u64::MAX, 0).await.unwrap();
    }

    #[tokio::test]
    async fn files_without_name_count_until_they_have_one() {
        let fixture = Fixture::new();
        let Fixture { disk, session, .. } = &fixture;
        fixture
            .monitored(async {
                fixture.reserve(3 * MIB, 1).await.unwrap();
                disk.hold_unnamed(*session, 3 * MIB);
                fixture.reserve(3 * MIB, 1).await.unwrap_err();
                fixture.reserve(MIB / 2, 1).await.unwrap();
                disk.release_unnamed(*session, 3 * MIB, false);
                fixture.reserve(3 * MIB, 1).await.unwrap();
                disk.hold_unnamed(*session, 3 * MIB);
                fixture.write("file", 3 * MIB);
                disk.release_unnamed(*session, 3 * MIB, true);
                fixture.reserve(3 * MIB, 1).await.unwrap_err();
            })
            .await;
    }

    #[tokio::test]
    async fn run_is_stopped_when_session_grows() {
        let fixture = Fixture::new();
        fixture
            .monitored(async {
                let run = fixture.disk.watch_run(fixture.session, LIMITS).await.unwrap();
                fixture.write("file", 5 * MIB);
                assert_eq!(run.exceeded_limit().await, Limit::DiskBytes);
                drop(run);
                fixture.write("file", 0);
                fixture.measured().await;
                let run = fixture.disk.watch_run(fixture.session, LIMITS).await.unwrap();
                (0..30).for_each(|number| fixture.write(&number.to_string(), 0));
                assert_eq!(run.exceeded_limit().await, Limit::Inodes);
            })
            .await;
        assert!(!fixture.disk.has_scanned_runs());
    }

    #[tokio::test]
    async fn run_has_lower_limits_than_its_session() {
        let fixture = Fixture::new();
        let lower = DiskLimits { bytes: MIB, ..LIMITS };
        fixture
            .monitored(async {
                let high = fixture.disk.watch_run(fixture.session, LIMITS).await.unwrap();
                let low = fixture.disk.watch_run(fixture.session, lower).await.unwrap();
                fixture.measured().await;
                fixture.write("file", 3 * MIB);
                assert_eq!(low.exceeded_limit().await, Limit::DiskBytes);
                assert!(!high.run.is_stopped());
            })
            .await;
    }
}
