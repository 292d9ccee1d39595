//! Rates of each tenant, counted in this process: of its requests, and of its reads of lists.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use codelia_types::{Reason, TenantId};
use governor::{
    DefaultDirectRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};
use tokio::time::timeout;

use crate::{cache::Cache, error::ApiError};

/// How long a read may wait for its turn.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// A rate limit for each tenant. One that is forgotten starts with a full second's rate.
#[derive(Debug, Default)]
pub(crate) struct RateLimits {
    limiters: Cache<TenantId, (NonZeroU32, Arc<DefaultDirectRateLimiter>)>,
}

impl RateLimits {
    /// Takes one of the tenant's turns, of which there are `rate` a second.
    ///
    /// # Errors
    /// [`Reason::RateLimited`] if none is left now.
    pub(crate) fn check(&self, tenant: &TenantId, rate: u32) -> Result<(), ApiError> {
        let checked = self.limiter(tenant, rate).check();
        checked.map_err(|until| limited(until.wait_time_from(DefaultClock::default().now())))
    }

    /// Waits for one of the tenant's turns.
    ///
    /// # Errors
    /// [`Reason::RateLimited`] if none comes soon.
    pub(crate) async fn wait(&self, tenant: &TenantId, rate: u32) -> Result<(), ApiError> {
        let limiter = self.limiter(tenant, rate);
        let waited = timeout(MAX_WAIT, limiter.until_ready()).await;
        waited.map_err(|_| limited(MAX_WAIT))
    }

    /// The tenant's limiter, replaced when its rate has changed.
    fn limiter(&self, tenant: &TenantId, rate: u32) -> Arc<DefaultDirectRateLimiter> {
        let rate = NonZeroU32::new(rate).unwrap_or(NonZeroU32::MIN);
        let mut limiters = self.limiters.lock();
        if let Some((current, limiter)) = limiters.get(tenant)
            && *current == rate
        {
            return limiter.clone();
        }
        let limiter = Arc::new(RateLimiter::direct(Quota::per_second(rate)));
        limiters.insert(tenant.clone(), (rate, limiter.clone()));
        limiter
    }
}

/// The tenant calls too often.
fn limited(delay: Duration) -> ApiError {
    let message =
        format!("quota `requests_per_second` reached; retry in {} ms", delay.as_millis().max(1));
    ApiError::new(Reason::RateLimited, message).of_quota("requests_per_second").retry_after(delay)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_limited(checked: Result<(), ApiError>) -> bool {
        checked.is_err_and(|error| error.reason() == Reason::RateLimited)
    }

    #[test]
    fn refusal_names_delay_and_follows_new_rate() {
        let (limits, tenant) = (RateLimits::default(), "slow".parse().unwrap());
        assert!(limits.check(&tenant, 1).is_ok());
        let refused = limits.check(&tenant, 1);
        assert!(is_limited(refused));
        assert!(limits.check(&tenant, 100).is_ok());
    }

    #[tokio::test]
    async fn reads_of_one_tenant_wait_for_their_rate() {
        let limits = RateLimits::default();
        let [flood, other] = ["flood", "other"].map(|id| id.parse::<TenantId>().unwrap());
        while limits.check(&flood, 20).is_ok() {}
        limits.check(&other, 20).unwrap();
        limits.wait(&flood, 20).await.unwrap();
        // The turn that came while it waited is taken.
        assert!(is_limited(limits.check(&flood, 20)));
    }
}
