//! Usage and limits of the files of one session, and when to measure them again.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_backends::UsageReader;
use codelia_policy::{DiskLimits, Limit};
use codelia_telemetry::DiskCause;
use codelia_types::{DiskMechanism, DiskUsage};
use parking_lot::Mutex;

use super::{
    error::{DiskFull, NoRoom},
    quota::{Quota, Target},
    run_watch::RunWatch,
    scan::{Found, Walk},
};
use crate::file_work::if_exists;

/// Between two measurements of a session with a run, at least.
const INTERVAL: Duration = Duration::from_millis(250);
/// The same where the kernel enforces the limits: only reports need it.
const QUOTA_INTERVAL: Duration = Duration::from_secs(1);
/// Measuring takes at most one part in this many of the time of one core, for each session.
const SHARE: u32 = 20;
/// The same when the free space of the disk shrinks fast.
const HINTED_SHARE: u32 = 4;
/// A measurement of an idle session counts this many inodes and four times its limit at most.
const MAX_IDLE_INODES: u64 = 1_000_000;
/// A run is stopped if this many measurements in a row were disturbed: something moves directories
/// away from them.
const MAX_DISTURBED: u32 = 8;

/// No run starts in a session that exceeds a limit by this much and uses twice as much as allowed.
const HARD_LIMIT: DiskUsage = DiskUsage { bytes: 4 << 30, inodes: 500_000 };

/// The limits and the last known usage of a session.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) target: Arc<Target>,
    /// `None` if the directory is scanned.
    pub(super) quota: Option<Arc<dyn Quota>>,
    /// Held while limits are set in the kernel.
    pub(super) setting: Arc<Mutex<()>>,
    /// The limits of the session; a run may have lower ones.
    limits: DiskLimits,
    measured: Option<DiskUsage>,
    /// The last measurement found everything.
    is_complete: bool,
    /// Reservations of file calls since the last measurement began.
    reserved: DiskUsage,
    /// Reservations from before the current measurement began.
    reserved_before: DiskUsage,
    /// Bytes in files of calls that have no name yet, so that no measurement finds them.
    unnamed_bytes: u64,
    runs: Vec<Arc<RunWatch>>,
    schedule: Schedule,
    /// The last measurement found too much. Files that are renamed meanwhile may count twice, so a
    /// second one has to find it too.
    is_suspect: bool,
    /// Measurements in a row that were disturbed.
    disturbed: u32,
    /// The free bytes of the disk when it was last measured.
    free_bytes: u64,
}

/// When a session is measured.
#[derive(Debug, Default)]
struct Schedule {
    /// Something may have changed since the last measurement began.
    is_stale: bool,
    is_measuring: bool,
    /// Measurements that have begun.
    begun: u64,
    ended_at: Option<Instant>,
    /// How long the last one took.
    cost: Duration,
    /// The free space of the disk shrinks, or a run has ended.
    is_urgent: bool,
    /// A file call waits for it.
    is_requested: bool,
}

/// The input of a measurement. It reads files, so it begins without the lock of all accounts.
#[derive(Debug)]
pub(super) struct Beginning {
    target: Arc<Target>,
    quota: Option<Arc<dyn Quota>>,
    /// List the processes of its runs.
    processes: Vec<UsageReader>,
    /// Where it may stop counting.
    max: DiskUsage,
}

impl Beginning {
    pub(super) fn measure(self) -> io::Result<Begun> {
        if let Some(quota) = &self.quota {
            let usage = quota.usage(&self.target)?;
            return Ok(Begun::Known(Found { usage, ..Found::default() }));
        }
        let processes = self.processes.iter().flat_map(|reader| reader.pids().unwrap_or_default());
        let walk = Walk::begin(&self.target.directory, processes.collect(), self.max);
        // A directory that is being removed has nothing.
        Ok(if_exists(walk)?.map_or_else(|| Begun::Known(Found::default()), Begun::Walk))
    }
}

impl Account {
    pub(super) fn new(target: Target, quota: Option<Arc<dyn Quota>>, limits: DiskLimits) -> Self {
        Self {
            target: Arc::new(target),
            quota,
            setting: Arc::default(),
            limits,
            measured: None,
            is_complete: false,
            reserved: DiskUsage::default(),
            reserved_before: DiskUsage::default(),
            unnamed_bytes: 0,
            runs: Vec::new(),
            schedule: Schedule { is_stale: true, ..Schedule::default() },
            is_suspect: false,
            disturbed: 0,
            free_bytes: 0,
        }
    }

    pub(super) fn mechanism(&self) -> DiskMechanism {
        self.quota.as_ref().map_or(DiskMechanism::Scan, |quota| quota.mechanism())
    }

    pub(super) fn usage(&self) -> Option<(DiskUsage, DiskLimits)> {
        self.measured.map(|usage| (usage, self.limits))
    }

    /// The limit that the session exceeds so far that no run may start in it: only file calls can
    /// make room. A run may exceed a limit by less, and delete files then.
    pub(super) fn over_hard_limit(&self) -> Option<DiskFull> {
        let used = self.measured?;
        let hard =
            |limit: u64, least: u64| limit.saturating_mul(2).max(limit.saturating_add(least));
        let full = |limit, used, max, least| {
            (used > hard(max, least)).then_some(DiskFull { limit, used, max })
        };
        full(Limit::DiskBytes, used.bytes, self.limits.bytes, HARD_LIMIT.bytes)
            .or_else(|| full(Limit::Inodes, used.inodes, self.limits.inodes, HARD_LIMIT.inodes))
    }

    pub(super) fn is_measured(&self) -> bool {
        self.measured.is_some()
    }

    pub(super) fn has_runs(&self) -> bool {
        !self.runs.is_empty()
    }

    /// The lowest of the limits of the session and its runs.
    pub(super) fn lowest_limits(&self) -> DiskLimits {
        self.runs.iter().fold(self.limits, |limits, run| limits.lowered_to(run.limits))
    }

    /// Adds a run. What the session uses is known only if nothing has changed since.
    pub(super) fn add_run(&mut self, limits: DiskLimits) -> Arc<RunWatch> {
        let Schedule { is_stale, is_measuring, .. } = self.schedule;
        let is_known = self.is_complete && self.runs.is_empty() && !is_stale && !is_measuring;
        let known = self.measured.filter(|_| is_known);
        let run = Arc::new(RunWatch::new(limits.lowered_to(self.limits), known));
        self.runs.push(run.clone());
        run
    }

    pub(super) fn remove_run(&mut self, run: &Arc<RunWatch>) {
        self.runs.retain(|known| !Arc::ptr_eq(known, run));
        self.schedule.is_stale = true;
        // The next run needs to know what this one left.
        self.schedule.is_urgent = true;
    }

    pub(super) fn set_stale(&mut self) {
        self.schedule.is_stale = true;
    }

    pub(super) fn reserve(&mut self, more: DiskUsage) -> Result<(), NoRoom> {
        let measured = self.measured.ok_or(NoRoom::NotMeasured)?;
        let mut used = add(add(measured, self.reserved_before), self.reserved);
        used.bytes = used.bytes.saturating_add(self.unnamed_bytes);
        check(Limit::DiskBytes, used.bytes, more.bytes, self.limits.bytes)?;
        check(Limit::Inodes, used.inodes, more.inodes, self.limits.inodes)?;
        self.reserved = add(self.reserved, more);
        self.schedule.is_stale = true;
        Ok(())
    }

    /// Bytes that were reserved are in a file without a name.
    pub(super) fn hold_unnamed(&mut self, bytes: u64) {
        let of_last = bytes.min(self.reserved.bytes);
        self.reserved.bytes -= of_last;
        let before = &mut self.reserved_before.bytes;
        *before = before.saturating_sub(bytes - of_last);
        self.unnamed_bytes = self.unnamed_bytes.saturating_add(bytes);
    }

    /// The file has a name, so that the next measurement finds it, or is gone.
    pub(super) fn release_unnamed(&mut self, bytes: u64, has_name: bool) {
        self.unnamed_bytes = self.unnamed_bytes.saturating_sub(bytes);
        if has_name {
            self.reserved.bytes = self.reserved.bytes.saturating_add(bytes);
        }
        self.schedule.is_stale = true;
    }

    /// Has the session measured now. Returns the number of that measurement.
    pub(super) fn request_measurement(&mut self) -> u64 {
        self.schedule.is_stale = true;
        self.schedule.is_requested = true;
        self.schedule.begun + 1
    }

    /// Whether this measurement has ended.
    pub(super) fn has_measured(&self, number: u64) -> bool {
        self.schedule.begun >= number && !self.schedule.is_measuring || self.schedule.begun > number
    }

    /// Whether a new measurement can show that there is room.
    pub(super) fn is_stale(&self) -> bool {
        self.schedule.is_stale
    }

    pub(super) fn stop_runs(&self, limit: Limit, cause: DiskCause) {
        self.runs.iter().for_each(|run| run.stop(limit, cause));
    }

    /// When the next measurement is due; `None` if nothing needs one.
    pub(super) fn due_at(&self, now: Instant) -> Option<Instant> {
        let Schedule { is_stale, is_measuring, ended_at, cost, is_urgent, is_requested, .. } =
            self.schedule;
        if is_measuring || !(is_stale || self.has_runs()) {
            return None;
        }
        let Some(ended_at) = ended_at else { return Some(now) };
        let pause = match &self.quota {
            _ if self.is_suspect => Duration::ZERO,
            _ if is_requested || is_urgent => cost * HINTED_SHARE,
            None => INTERVAL.max(cost * SHARE),
            Some(_) => QUOTA_INTERVAL,
        };
        Some(ended_at + pause)
    }

    /// Has the session measured soon if the free space of the disk has shrunk by more than a share
    /// of what the session has left.
    pub(super) fn note_free_bytes(&mut self, free: u64) {
        if self.quota.is_some() || !self.has_runs() {
            return;
        }
        let used = self.measured.map_or(0, |usage| usage.bytes);
        let left = self.lowest_limits().bytes.saturating_sub(used);
        self.schedule.is_urgent |= self.free_bytes.saturating_sub(free) > (left / 8).max(1 << 20);
    }

    /// Begins a measurement.
    pub(super) fn begin(&mut self, free_bytes: u64) -> Beginning {
        self.schedule.is_measuring = true;
        self.schedule.is_stale = false;
        self.schedule.is_requested = false;
        self.schedule.begun += 1;
        self.free_bytes = free_bytes;
        self.reserved_before = add(self.reserved_before, std::mem::take(&mut self.reserved));
        Beginning {
            target: self.target.clone(),
            quota: self.quota.clone(),
            processes: self.runs.iter().filter_map(|run| run.processes.get().cloned()).collect(),
            max: self.max_counted(),
        }
    }

    /// Where a measurement may stop counting.
    fn max_counted(&self) -> DiskUsage {
        let idle = self.limits.inodes.saturating_mul(4).saturating_add(MAX_IDLE_INODES);
        let bounds = self.runs.iter().map(|run| run.allowed());
        let of_runs = bounds.reduce(|one, other| DiskUsage {
            bytes: one.bytes.max(other.bytes),
            inodes: one.inodes.max(other.inodes),
        });
        match of_runs {
            Some(allowed) if self.runs.iter().all(|run| run.at_start.get().is_some()) => allowed,
            _ => DiskUsage { bytes: u64::MAX, inodes: idle },
        }
    }

    /// Takes the result of a measurement, and stops runs that exceed their limits.
    pub(super) fn measured(&mut self, found: Found, cost: Duration, now: Instant) {
        self.ended(cost, now);
        self.reserved_before = DiskUsage::default();
        self.disturbed = if found.is_disturbed { self.disturbed + 1 } else { 0 };
        // Files that a disturbed measurement has not found may still be there.
        let usage = match self.measured {
            Some(last) if found.is_disturbed => max(last, found.usage),
            _ => found.usage,
        };
        self.measured = Some(usage);
        self.is_complete = !found.is_over && !found.is_disturbed;
        if self.quota.as_ref().is_some_and(|quota| quota.limits_runs()) {
            return;
        }
        let runs = self.runs.iter();
        // A measurement that ended early says nothing about what a new run has found.
        let known = runs.filter(|run| self.is_complete || run.at_start.get().is_some());
        let exceeded: Vec<_> =
            known.filter_map(|run| run.exceeds(usage).map(|limit| (run, limit))).collect();
        if self.is_suspect {
            exceeded.iter().for_each(|(run, limit)| run.stop(*limit, DiskCause::Session));
        }
        self.is_suspect = !self.is_suspect && !exceeded.is_empty();
        if self.disturbed >= MAX_DISTURBED {
            self.stop_runs(Limit::Inodes, DiskCause::Session);
        }
    }

    /// A measurement was given up: the monitor makes another.
    pub(super) fn give_up(&mut self) {
        self.schedule.is_measuring = false;
        self.schedule.is_stale = true;
    }

    /// A measurement failed: the last one stays.
    pub(super) fn failed(&mut self, cost: Duration, now: Instant) {
        self.ended(cost, now);
        self.schedule.is_stale = true;
        // Fast failures are not repeated all the time.
        self.schedule.cost = cost.max(INTERVAL);
    }

    fn ended(&mut self, cost: Duration, now: Instant) {
        self.schedule.is_measuring = false;
        self.schedule.is_urgent = false;
        self.schedule.ended_at = Some(now);
        self.schedule.cost = cost;
    }

    /// The worker gives the session up.
    pub(super) fn forget(self) {
        if let Some(quota) = &self.quota {
            quota.forget(&self.target);
        }
    }
}

fn check(limit: Limit, used: u64, more: u64, max: u64) -> Result<(), DiskFull> {
    if more > 0 && used.saturating_add(more) > max {
        Err(DiskFull { limit, used, max })
    } else {
        Ok(())
    }
}

fn add(one: DiskUsage, other: DiskUsage) -> DiskUsage {
    DiskUsage {
        bytes: one.bytes.saturating_add(other.bytes),
        inodes: one.inodes.saturating_add(other.inodes),
    }
}

fn max(one: DiskUsage, other: DiskUsage) -> DiskUsage {
    DiskUsage { bytes: one.bytes.max(other.bytes), inodes: one.inodes.max(other.inodes) }
}

/// How a measurement begins.
#[derive(Debug)]
pub(super) enum Begun {
    Walk(Walk),
    /// The kernel knows the usage.
    Known(Found),
}

#[cfg(test)]
mod tests {
    use codelia_policy::Ids;
    use codelia_types::{Mode, SessionId};

    use super::*;

    const LIMITS: DiskLimits = DiskLimits { bytes: 1 << 30, inodes: 1000 };

    fn account() -> Account {
        let target = Target {
            session: SessionId::generate(),
            directory: "/nonexistent".into(),
            mode: Mode::Logical,
            ids: Ids { uid: 0, gid: 0 },
        };
        Account::new(target, None, LIMITS)
    }

    fn found(inodes: u64, is_over: bool) -> Found {
        Found { usage: DiskUsage { bytes: 0, inodes }, is_over, is_disturbed: false }
    }

    fn measure(account: &mut Account, found: Found) {
        account.begin(0);
        account.measured(found, Duration::ZERO, Instant::now());
    }

    #[test]
    fn second_measurement_confirms_the_first() {
        let mut account = account();
        measure(&mut account, found(5, false));
        let run = account.add_run(LIMITS);
        for inodes in [2000, 500, 2000] {
            measure(&mut account, found(inodes, false));
            assert!(!run.is_stopped());
        }
        measure(&mut account, found(2000, false));
        assert!(run.is_stopped());
    }

    #[test]
    fn run_after_one_that_was_stopped_may_delete_files() {
        let mut account = account();
        measure(&mut account, found(5, false));
        let first = account.add_run(LIMITS);
        // It ends during a measurement, which ends early.
        account.begin(0);
        account.remove_run(&first);
        let second = account.add_run(LIMITS);
        account.measured(found(1001, true), Duration::ZERO, Instant::now());
        for inodes in [3000, 3000, 2000, 2000] {
            measure(&mut account, found(inodes, false));
            assert!(!second.is_stopped());
        }
        account.remove_run(&second);
        // The third starts during the next measurement, and the last one is old.
        account.begin(0);
        let third = account.add_run(LIMITS);
        account.measured(found(4000, false), Duration::ZERO, Instant::now());
        measure(&mut account, found(4000, false));
        assert!(!third.is_stopped());
        // The control: one that grows the session is stopped.
        measure(&mut account, found(4100, false));
        measure(&mut account, found(4100, false));
        assert!(third.is_stopped());
    }
}
