//! The quota on stored output. Summing it for every run is too expensive, so a sum is reused for a
//! short time unless it is near the quota. The store checks the other quotas on insert.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_store::{Caller, Store};
use codelia_types::TenantId;

use crate::{recent_map::RecentMap, status::ApiError};

/// How long a sum is reused.
const MAX_AGE: Duration = Duration::from_secs(2);
/// Tenants whose sum is kept.
const MAX_TENANTS: usize = 4096;

/// Stored output of a tenant at a point in time.
#[derive(Debug, Clone, Copy)]
struct OutputUsage {
    bytes: i64,
    measured_at: Instant,
}

impl OutputUsage {
    /// Whether the sum is recent and far enough from the quota to be reused.
    fn is_usable(&self, quota: i64, now: Instant) -> bool {
        self.bytes <= quota / 2 && now.duration_since(self.measured_at) < MAX_AGE
    }
}

/// Checks the quota on stored output.
#[derive(Debug)]
pub(crate) struct OutputQuota {
    usage: Mutex<RecentMap<TenantId, OutputUsage>>,
}

impl Default for OutputQuota {
    fn default() -> Self {
        Self { usage: Mutex::new(RecentMap::new(MAX_TENANTS)) }
    }
}

impl OutputQuota {
    /// Fails if the caller's tenant stores as much output as its quota allows.
    pub(crate) async fn check(&self, store: &Store, caller: &Caller) -> Result<(), ApiError> {
        let quota = caller.quotas.output_bytes;
        if self.cached(&caller.tenant).is_some_and(|usage| usage.is_usable(quota, Instant::now())) {
            return Ok(());
        }
        let bytes = store.tenant_output_bytes(&caller.tenant).await?;
        self.insert(&caller.tenant, OutputUsage { bytes, measured_at: Instant::now() });
        if bytes >= quota { Err(ApiError::QuotaExceeded { quota: "output_bytes" }) } else { Ok(()) }
    }

    fn cached(&self, tenant: &TenantId) -> Option<OutputUsage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner).get(tenant).copied()
    }

    fn insert(&self, tenant: &TenantId, usage: OutputUsage) {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner).insert(tenant.clone(), usage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_reused_while_recent_and_below_half() {
        let at = Instant::now();
        assert!(OutputUsage { bytes: 50, measured_at: at }.is_usable(100, at));
        assert!(!OutputUsage { bytes: 51, measured_at: at }.is_usable(100, at));
        assert!(!OutputUsage { bytes: 0, measured_at: at }.is_usable(100, at + MAX_AGE));
    }
}
