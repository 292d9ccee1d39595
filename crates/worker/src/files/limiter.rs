//! Limits open file calls: each holds descriptors, and no tenant may hold them all.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

const MAX_CALLS: usize = 256;
const MAX_CALLS_PER_TENANT: usize = 64;

/// Counts the open calls of each tenant.
#[derive(Debug, Default)]
pub(crate) struct CallLimiter {
    by_tenant: Mutex<HashMap<String, usize>>,
}

/// Permission for one call, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct CallPermit {
    limiter: Arc<CallLimiter>,
    tenant: String,
}

impl CallLimiter {
    /// Permission for one more call; `None` if there are too many.
    pub(crate) fn try_acquire(self: &Arc<Self>, tenant: &str) -> Option<CallPermit> {
        let mut by_tenant = self.lock();
        let (all, own) = (by_tenant.values().sum::<usize>(), by_tenant.get(tenant).copied().unwrap_or(0));
        if all >= MAX_CALLS || own >= MAX_CALLS_PER_TENANT {
            return None;
        }
        by_tenant.insert(tenant.to_owned(), own + 1);
        Some(CallPermit { limiter: self.clone(), tenant: tenant.to_owned() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.by_tenant.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        let mut by_tenant = self.limiter.lock();
        match by_tenant.get_mut(&self.tenant) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(by_tenant.remove(&self.tenant)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_limited_in_total_and_per_tenant() {
        let limiter = Arc::<CallLimiter>::default();
        let held: Vec<CallPermit> = std::iter::from_fn(|| limiter.try_acquire("greedy")).collect();
        assert_eq!(held.len(), MAX_CALLS_PER_TENANT);
        let other = limiter.try_acquire("other");
        assert!(other.is_some());
        drop((held, other));
        assert!(limiter.try_acquire("greedy").is_some());
        assert!(limiter.lock().is_empty());
        let many = (0..).map_while(|n: usize| limiter.try_acquire(&(n / 50).to_string()));
        let held: Vec<CallPermit> = many.collect();
        assert_eq!(held.len(), MAX_CALLS);
    }
}
