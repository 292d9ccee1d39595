//! What is known about the files of one session.

use std::sync::Arc;

use codelia_policy::{DiskLimits, Limit};
use codelia_types::{DiskMechanism, DiskUsage};

use super::{DiskFull, Quota, RunWatch, Target};

/// The limits and the last known usage of a session.
#[derive(Debug)]
pub(super) struct Account {
    target: Target,
    /// `None` if the directory is scanned.
    quota: Option<Arc<dyn Quota>>,
    /// Those of the session; a run may have lower ones.
    limits: DiskLimits,
    measured: Option<DiskUsage>,
    /// What file calls have reserved since the last measurement began.
    reserved: DiskUsage,
    runs: Vec<Arc<RunWatch>>,
}

impl Account {
    pub(super) fn new(target: Target, quota: Option<Arc<dyn Quota>>, limits: DiskLimits) -> Self {
        Self { target, quota, limits, measured: None, reserved: DiskUsage::default(), runs: Vec::new() }
    }

    pub(super) fn mechanism(&self) -> DiskMechanism {
        self.quota.as_ref().map_or(DiskMechanism::Scan, |quota| quota.mechanism())
    }

    pub(super) fn usage(&self) -> Option<(DiskUsage, DiskLimits)> {
        self.measured.map(|usage| (usage, self.limits))
    }

    pub(super) fn reserve(&mut self, more: DiskUsage) -> Result<(), DiskFull> {
        let measured = self.measured.unwrap_or_default();
        let sum = |measured: u64, reserved: u64| measured.saturating_add(reserved);
        let bytes = sum(measured.bytes, self.reserved.bytes);
        let inodes = sum(measured.inodes, self.reserved.inodes);
        check(Limit::DiskBytes, bytes, more.bytes, self.limits.bytes)?;
        check(Limit::Inodes, inodes, more.inodes, self.limits.inodes)?;
        self.reserved.bytes = sum(self.reserved.bytes, more.bytes);
        self.reserved.inodes = sum(self.reserved.inodes, more.inodes);
        Ok(())
    }

    pub(super) fn stop_runs(&self, limit: Limit) {
        self.runs.iter().for_each(|run| run.stop(limit));
    }

    /// The worker gives the session up.
    pub(super) fn forget(self) {
        if let Some(quota) = &self.quota {
            quota.forget(&self.target);
        }
    }
}

fn check(limit: Limit, used: u64, more: u64, max: u64) -> Result<(), DiskFull> {
    if more > 0 && used.saturating_add(more) > max { Err(DiskFull { limit, used, max }) } else { Ok(()) }
}
