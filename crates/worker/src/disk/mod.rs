//! What the files of the sessions of this worker use, and their limits.
//!
//! Where the kernel has no quota for a session, the worker measures its directory ([`scan`]) and
//! stops runs that exceed a limit ([`monitor`]). File calls are checked in every case: the worker's
//! own writes may be exempt from quotas.

mod account;
mod quota;
mod report;
mod run_watch;
mod space;

use std::{
    collections::HashMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use codelia_policy::{DiskLimits, Ids, Limit};
use codelia_types::{DiskMechanism, DiskUsage, Mode, SessionId};
use tokio::sync::Notify;

use self::account::Account;
pub(crate) use self::{
    quota::{Quota, Target},
    report::DiskReporter,
    run_watch::RunWatch,
    space::Space,
};
pub use self::space::root_space;

/// A session has no room for what a call wants to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session uses {used} of {max} ({limit})")]
pub(crate) struct DiskFull {
    /// The limit that would be exceeded: disk bytes or inodes.
    pub(crate) limit: Limit,
    /// What the session uses, with what open calls have reserved.
    pub(crate) used: u64,
    pub(crate) max: u64,
}

/// What is known about the files of the sessions that this worker holds.
#[derive(Debug)]
pub(crate) struct Disk {
    /// The directory of session directories.
    sessions: PathBuf,
    /// `None` if directories are scanned.
    quota: Option<Arc<dyn Quota>>,
    accounts: Mutex<HashMap<SessionId, Account>>,
    /// There may be something to measure.
    changed: Notify,
}

impl Disk {
    /// `root` is the session root. Without a quota of the kernel, directories are scanned.
    pub(crate) fn new(root: &Path, quota: Option<Arc<dyn Quota>>) -> Self {
        let sessions = root.join("sessions");
        Self { sessions, quota, accounts: Mutex::default(), changed: Notify::new() }
    }

    /// What limits most sessions here. Some may be scanned although there is a quota.
    pub(crate) fn mechanism(&self) -> DiskMechanism {
        self.quota.as_ref().map_or(DiskMechanism::Scan, |quota| quota.mechanism())
    }

    /// Blocking. Begins to limit a session that this worker takes, before anything uses its directory.
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
        self.lock().insert(session, Account::new(target, quota, limits));
        self.changed.notify_one();
        Ok(())
    }

    /// Forgets a session whose lease is given up or whose directory is removed.
    pub(crate) fn detach(&self, session: SessionId) {
        let account = self.lock().remove(&session);
        if let Some(account) = account {
            account.forget();
        }
    }

    /// Forgets all sessions.
    pub(crate) fn detach_all(&self) {
        let accounts = std::mem::take(&mut *self.lock());
        accounts.into_values().for_each(Account::forget);
    }

    /// The last known usage of a session, and its limits. `None` if it is not held or not measured yet.
    pub(crate) fn usage(&self, session: SessionId) -> Option<(DiskUsage, DiskLimits)> {
        self.lock().get(&session).and_then(Account::usage)
    }

    /// The last known usage of all sessions that were measured.
    pub(crate) fn usages(&self) -> Vec<(SessionId, DiskUsage, DiskLimits)> {
        let known = |(id, account): (&SessionId, &Account)| {
            account.usage().map(|(usage, limits)| (*id, usage, limits))
        };
        self.lock().iter().filter_map(known).collect()
    }

    /// What limits a session that is held.
    pub(crate) fn mechanism_of(&self, session: SessionId) -> Option<DiskMechanism> {
        self.lock().get(&session).map(Account::mechanism)
    }

    /// Refuses if this many more bytes or inodes would exceed a limit of the session; else counts
    /// them until its next measurement.
    pub(crate) fn reserve(&self, session: SessionId, bytes: u64, inodes: u64) -> Result<(), DiskFull> {
        match self.lock().get_mut(&session) {
            Some(account) => account.reserve(DiskUsage { bytes, inodes }),
            // The lease is gone: the call fails when it checks that.
            None => Ok(()),
        }
    }

    /// Stops all runs of a session as `limit`, such as when its tenant has no room left.
    pub(crate) fn stop_runs(&self, session: SessionId, limit: Limit) {
        if let Some(account) = self.lock().get(&session) {
            account.stop_runs(limit);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Account>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
