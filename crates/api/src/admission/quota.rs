//! Quotas on runs, sessions, stored output and files. Counting for every run or session is too
//! expensive, so a count is reused for a short time unless it is near the quota.

use std::time::{Duration, Instant};

use codelia_store::{Caller, Quotas, Store, StoredBytes};
use codelia_types::{Reason, TenantId};

use crate::{cache::Cache, error::ApiError};

/// How long a count or sum is reused.
const MAX_AGE: Duration = Duration::from_secs(2);
/// A count that took long is reused for this many times as long, so that counting never takes more
/// than a small share of the time.
const MAX_AGE_FACTOR: u32 = 50;
const MIB: i64 = 1024 * 1024;

/// What a tenant stores at a point in time.
#[derive(Debug, Clone, Copy)]
struct Stored {
    bytes: StoredBytes,
    measured_at: Instant,
}

impl Stored {
    /// Whether the sums are recent and far enough from the quotas to be reused.
    fn is_usable(&self, quotas: &Quotas, now: Instant) -> bool {
        self.bytes.output <= quotas.output_bytes / 2
            && self.bytes.disk <= quotas.disk_bytes / 2
            && now.duration_since(self.measured_at) < MAX_AGE
    }
}

/// Checks the quotas on stored output and on the files of sessions.
#[derive(Debug, Default)]
pub(crate) struct StorageQuota {
    stored: Cache<TenantId, Stored>,
}

impl StorageQuota {
    /// Fails if the caller's tenant may not store the output or the files of a run.
    pub(crate) async fn check_run(&self, store: &Store, caller: &Caller) -> Result<(), ApiError> {
        let stored = self.stored(store, caller).await?;
        if stored.output >= caller.quotas.output_bytes {
            return Err(ApiError::quota_exceeded("output_bytes"));
        }
        check_disk(stored, caller)
    }

    /// Fails if the files of the caller's tenant use as much as its quota allows.
    pub(crate) async fn check_files(&self, store: &Store, caller: &Caller) -> Result<(), ApiError> {
        check_disk(self.stored(store, caller).await?, caller)
    }

    async fn stored(&self, store: &Store, caller: &Caller) -> Result<StoredBytes, ApiError> {
        if let Some(stored) = self.stored.get(&caller.tenant)
            && stored.is_usable(&caller.quotas, Instant::now())
        {
            return Ok(stored.bytes);
        }
        let bytes = store.tenant_stored_bytes(&caller.tenant).await?;
        let stored = Stored { bytes, measured_at: Instant::now() };
        self.stored.insert(caller.tenant.clone(), stored);
        Ok(bytes)
    }
}

fn check_disk(stored: StoredBytes, caller: &Caller) -> Result<(), ApiError> {
    let quota = caller.quotas.disk_bytes;
    if stored.disk < quota {
        return Ok(());
    }
    let message = format!(
        "quota `disk_bytes` reached: the files of the tenant's sessions use {} MiB of {} MiB; remove files \
         (RemoveFile, `codelia rm`) or close sessions, or ask an operator to raise it",
        stored.disk / MIB,
        quota / MIB,
    );
    Err(ApiError::new(Reason::QuotaExceeded, message).of_quota("disk_bytes"))
}

/// What a tenant has of `N` kinds at a point in time, and how much this process inserted since.
#[derive(Debug, Clone, Copy)]
struct Usage<const N: usize> {
    counted: [i64; N],
    inserted: i64,
    expires_at: Instant,
}

impl<const N: usize> Usage<N> {
    /// Whether the tenant is so far from its quotas that the next insert need not count.
    fn is_far(&self, quotas: [i64; N], now: Instant) -> bool {
        let is_far = |counted: i64, quota: i64| {
            counted.saturating_add(self.inserted) < quota / 2 && self.inserted < quota / 8
        };
        now < self.expires_at
            && self.counted.into_iter().zip(quotas).all(|(counted, quota)| is_far(counted, quota))
    }
}

/// Decides which inserts count what their tenant has.
#[derive(Debug, Default)]
pub(crate) struct CountQuota<const N: usize> {
    usage: Cache<TenantId, Usage<N>>,
}

/// Runs that have not ended, and queued ones.
pub(crate) type RunQuota = CountQuota<2>;
/// Open sessions.
pub(crate) type SessionQuota = CountQuota<1>;

impl<const N: usize> CountQuota<N> {
    /// Whether the next insert of a tenant must count against its quotas. If not, it counts as
    /// inserted from now on.
    pub(crate) fn must_count(&self, tenant: &TenantId, quotas: [i64; N]) -> bool {
        let mut usage = self.usage.lock();
        let Some(usage) = usage.get(tenant) else { return true };
        if !usage.is_far(quotas, Instant::now()) {
            return true;
        }
        usage.inserted += 1;
        false
    }

    /// Remembers what an insert that began at `begun` counted.
    pub(crate) fn counted(&self, tenant: &TenantId, counted: [i64; N], begun: Instant) {
        let now = Instant::now();
        let max_age = MAX_AGE.max(now.duration_since(begun).saturating_mul(MAX_AGE_FACTOR));
        let usage = Usage { counted, inserted: 1, expires_at: now + max_age };
        self.usage.insert(tenant.clone(), usage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_reused_while_recent_and_below_half() {
        let at = Instant::now();
        let quotas = Quotas { output_bytes: 100, disk_bytes: 1000, ..Quotas::default() };
        let stored = |output, disk| Stored { bytes: StoredBytes { output, disk }, measured_at: at };
        assert!(stored(50, 500).is_usable(&quotas, at));
        assert!(!stored(51, 0).is_usable(&quotas, at));
        assert!(!stored(0, 501).is_usable(&quotas, at));
        assert!(!stored(0, 0).is_usable(&quotas, at + MAX_AGE));
    }

    #[test]
    fn runs_are_counted_near_a_quota() {
        let (now, later) = (Instant::now(), Instant::now() + MAX_AGE);
        let quotas = [800, 80];
        let usage = |active, queued, inserted| Usage {
            counted: [active, queued],
            inserted,
            expires_at: later,
        };
        assert!(usage(390, 30, 9).is_far(quotas, now));
        assert!(!usage(391, 30, 9).is_far(quotas, now), "near the quota of active runs");
        assert!(!usage(0, 31, 9).is_far(quotas, now), "near the quota of queued runs");
        assert!(!usage(0, 0, 10).is_far(quotas, now), "this process inserted many since");
        assert!(!usage(0, 0, 0).is_far(quotas, later), "the count is old");
    }
}
