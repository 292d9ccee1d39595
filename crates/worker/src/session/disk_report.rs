//! Reports what sessions use to the store, and stops what grows without room: of tenants at their
//! quota, and of all while the worker has less free than its reserve.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use codelia_policy::{DiskLimits, Limit};
use codelia_store::{DiskReport, DiskReported, DiskSpace, Error};
use codelia_telemetry::{DiskCause, metrics};
use codelia_types::{DiskUsage, SessionId, TenantId};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{core::Core, file_work::blocking};

/// A change of less than this and of less than 1 % is not reported.
const MIN_CHANGE_BYTES: u64 = 1024 * 1024;
/// Sessions that one report has at most. The next has the others.
const MAX_REPORTED: usize = 2000;
/// How much a session may grow while the worker has less free than its reserve, before its runs are
/// stopped: one that writes a few lines to a log takes nothing that matters.
const SHORT_GROWTH_BYTES: u64 = 1024 * 1024;
/// Free space is stored at least this often, if it changes.
const SPACE_INTERVAL: Duration = Duration::from_secs(10);

/// Reports usage, and acts on what the store answers.
#[derive(Debug)]
pub(crate) struct DiskReporter {
    pub(crate) core: Arc<Core>,
    pub(crate) memory: Mutex<Memory>,
}

/// Results of earlier passes.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// The usage that the store has of each held session.
    stored: HashMap<SessionId, DiskUsage>,
    /// Bytes that each held session used when the space became short.
    at_shortage: HashMap<SessionId, u64>,
    /// Tenants at their quota.
    full: HashSet<TenantId>,
    space: Option<(DiskSpace, Instant)>,
    /// The version of the usages of which the store has all.
    reported: Option<u64>,
}

/// The usage of a held session.
struct Held {
    report: DiskReport,
    tenant: TenantId,
}

impl DiskReporter {
    /// Reports the sessions whose usage changed, and stops what grows of tenants without room.
    pub(crate) async fn report(&self) -> Result<(), Error> {
        let current = self.core.lease.current();
        if !current.is_live() {
            return Ok(());
        }
        // With many idle sessions even the comparison costs.
        let version = self.core.disk.version();
        if self.memory.lock().reported == Some(version) {
            return Ok(());
        }
        let usages = self.core.disk.usages();
        let measured = usages.len();
        let held = self.held(usages);
        let sum = |of: fn(&DiskUsage) -> u64| held.iter().map(|held| of(&held.report.usage)).sum();
        metrics().disk.used(sum(|usage| usage.bytes), sum(|usage| usage.inodes));
        let (changed, tenants) = self.changed(&held);
        if changed.is_empty() && tenants.is_empty() {
            self.core.space.set_full(HashSet::new());
            // Others are about to be held, or released.
            self.memory.lock().reported = (held.len() == measured).then_some(version);
            return Ok(());
        }
        let Core { store, lease, .. } = &*self.core;
        let answer = store
            .session_disk_report(lease.worker(), current.incarnation, &changed, &tenants)
            .await?;
        metrics().disk.limits_crossed(answer.crossings);
        self.act(&held, &changed, &answer);
        Ok(())
    }

    /// The measured sessions that this worker holds.
    fn held(&self, usages: Vec<(SessionId, DiskUsage, DiskLimits)>) -> Vec<Held> {
        let held = usages.into_iter().filter_map(|(session, usage, limits)| {
            let (tenant, epoch) = self.core.sessions.tenant_and_epoch(session)?;
            let mechanism = self.core.disk.mechanism_of(session)?;
            Some(Held { report: DiskReport { session, epoch, mechanism, usage, limits }, tenant })
        });
        held.collect()
    }

    /// The sessions to report, and the tenants to ask for although none of their sessions changed:
    /// those that were at their quota and may have room now.
    fn changed(&self, held: &[Held]) -> (Vec<DiskReport>, Vec<TenantId>) {
        let mut memory = self.memory.lock();
        let here: HashSet<SessionId> = held.iter().map(|held| held.report.session).collect();
        let tenants: HashSet<&TenantId> = held.iter().map(|held| &held.tenant).collect();
        memory.stored.retain(|session, _| here.contains(session));
        memory.full.retain(|tenant| tenants.contains(tenant));
        let is_new = |report: &DiskReport| match memory.stored.get(&report.session) {
            Some(stored) => has_changed(*stored, report.usage, report.limits),
            None => true,
        };
        let changed = held.iter().map(|held| held.report).filter(is_new).take(MAX_REPORTED);
        (changed.collect(), memory.full.iter().cloned().collect())
    }

    /// Remembers what is stored, and acts on the tenants without room.
    fn act(&self, held: &[Held], changed: &[DiskReport], answer: &DiskReported) {
        let stored: HashSet<SessionId> = answer.sessions.iter().copied().collect();
        let mut memory = self.memory.lock();
        let mut grown = HashSet::new();
        for report in changed.iter().filter(|report| stored.contains(&report.session)) {
            let before = memory.stored.insert(report.session, report.usage).unwrap_or_default();
            if report.usage.bytes > before.bytes {
                grown.insert(report.session);
            }
        }
        for tenant in &answer.tenants {
            match tenant.is_full() {
                true => memory.full.insert(tenant.tenant.clone()),
                false => memory.full.remove(&tenant.tenant),
            };
        }
        let of_full = held.iter().filter(|held| memory.full.contains(&held.tenant));
        let full: HashSet<SessionId> = of_full.map(|held| held.report.session).collect();
        self.stop(full.intersection(&grown).copied(), DiskCause::Tenant);
        self.core.space.set_full(full);
    }

    /// Looks at the free space. While it is short, stops what grows.
    pub(crate) async fn watch_space(&self) -> Result<(), Error> {
        let space = self.core.space.clone();
        let measured = match blocking(move || space.measure()).await {
            Ok(measured) => measured,
            Err(error) => {
                tracing::warn!(%error, "cannot read the free space of the session root, retrying");
                return Ok(());
            }
        };
        metrics().disk.space(measured.free, measured.reserve);
        if measured.is_short {
            self.stop(self.grown().into_iter(), DiskCause::Reserve);
        } else {
            self.memory.lock().at_shortage.clear();
        }
        self.store_space(measured).await
    }

    /// The sessions that grew since the space became short.
    fn grown(&self) -> Vec<SessionId> {
        let usages = self.core.disk.usages();
        let mut memory = self.memory.lock();
        let held: HashSet<SessionId> = usages.iter().map(|(id, ..)| *id).collect();
        memory.at_shortage.retain(|id, _| held.contains(id));
        let mut has_grown = |id: SessionId, bytes: u64| {
            let before = *memory.at_shortage.entry(id).or_insert(bytes);
            bytes > before.saturating_add(SHORT_GROWTH_BYTES)
        };
        let grown = usages.iter().filter(|(id, usage, _)| has_grown(*id, usage.bytes));
        grown.map(|(id, ..)| *id).collect()
    }

    async fn store_space(&self, space: DiskSpace) -> Result<(), Error> {
        let current = self.core.lease.current();
        let is_due = self.memory.lock().space.is_none_or(|(stored, at)| {
            stored.is_short != space.is_short || (stored != space && at.elapsed() >= SPACE_INTERVAL)
        });
        if !current.is_live() || !is_due {
            return Ok(());
        }
        let is_news =
            self.memory.lock().space.is_none_or(|(stored, _)| stored.is_short != space.is_short);
        if is_news && space.is_short {
            let free = space.free;
            let reserve = space.reserve;
            tracing::warn!(free, reserve, "less space is free than the reserve: starting no runs");
        }
        let Core { store, lease, .. } = &*self.core;
        store.worker_report_disk(lease.worker(), current.incarnation, space).await?;
        self.memory.lock().space = Some((space, Instant::now()));
        Ok(())
    }

    /// Stops the runs of these sessions.
    fn stop(&self, sessions: impl Iterator<Item = SessionId>, cause: DiskCause) {
        sessions.for_each(|session| self.core.disk.stop_runs(session, Limit::DiskBytes, cause));
    }
}

/// Whether a change is worth a row. One that reaches or leaves a limit always is.
fn has_changed(stored: DiskUsage, now: DiskUsage, limits: DiskLimits) -> bool {
    let bytes = stored.bytes.abs_diff(now.bytes);
    let inodes = stored.inodes.abs_diff(now.inodes);
    let crosses = |stored: u64, now: u64, max: u64| (stored >= max) != (now >= max);
    bytes > MIN_CHANGE_BYTES
        || bytes > stored.bytes / 100
        || inodes > stored.inodes / 100
        || crosses(stored.bytes, now.bytes, limits.bytes)
        || crosses(stored.inodes, now.inodes, limits.inodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_changes_are_not_reported() {
        let limits = DiskLimits { bytes: 1 << 30, inodes: 10_000 };
        let usage = |bytes, inodes| DiskUsage { bytes, inodes };
        let changed = |from, to| has_changed(from, to, limits);
        assert!(!changed(usage(0, 0), usage(0, 0)));
        assert!(!changed(usage(50 << 20, 1000), usage((50 << 20) + 4096, 1010)));
        assert!(changed(usage(50 << 20, 1000), usage(52 << 20, 1000)), "more than 1 MiB");
        assert!(changed(usage(8192, 2), usage(4096, 2)), "more than 1 %");
        assert!(changed(usage(50 << 20, 1000), usage(50 << 20, 1011)), "more than 1 % of inodes");
        assert!(changed(usage((1 << 30) - 1, 1), usage(1 << 30, 1)), "the limit");
    }
}
