//! The quota on kept output. Counting it is too dear for every run, so a count is believed for a
//! short while, unless it is near the quota. The other quotas are checked where rows are inserted.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_store::{Caller, Store};
use codelia_types::TenantId;

use crate::status::ApiError;

const BELIEVED_FOR: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy)]
struct Counted {
    bytes: i64,
    at: Instant,
}

impl Counted {
    /// Far from the quota a count may be a little old; near it, it may not.
    fn holds(&self, quota: i64, now: Instant) -> bool {
        self.bytes <= quota / 2 && now.duration_since(self.at) < BELIEVED_FOR
    }
}

/// What tenants keep of output, as last counted.
#[derive(Debug, Default)]
pub(crate) struct OutputQuota {
    counted: Mutex<HashMap<TenantId, Counted>>,
}

impl OutputQuota {
    /// Fails if the caller's tenant keeps as much output as it may.
    pub(crate) async fn check(&self, store: &Store, caller: &Caller) -> Result<(), ApiError> {
        let quota = caller.quotas.output_bytes;
        if self.last(&caller.tenant).is_some_and(|counted| counted.holds(quota, Instant::now())) {
            return Ok(());
        }
        let bytes = store.tenant_usage(&caller.tenant).await?.output_bytes;
        self.remember(&caller.tenant, Counted { bytes, at: Instant::now() });
        if bytes >= quota { Err(ApiError::OverQuota { quota: "output_bytes" }) } else { Ok(()) }
    }

    fn last(&self, tenant: &TenantId) -> Option<Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).get(tenant).copied()
    }

    fn remember(&self, tenant: &TenantId, counted: Counted) {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).insert(tenant.clone(), counted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_believed_only_while_fresh_and_far_from_the_quota() {
        let at = Instant::now();
        assert!(Counted { bytes: 50, at }.holds(100, at));
        assert!(!Counted { bytes: 51, at }.holds(100, at));
        assert!(!Counted { bytes: 0, at }.holds(100, at + BELIEVED_FOR));
    }
}
