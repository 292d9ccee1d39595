//! Limits open file calls: each holds descriptors and some hold memory, and no tenant may hold them
//! all.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

const MAX_CALLS: usize = 256;
const MAX_CALLS_PER_TENANT: usize = 64;
/// The memory of calls that hold a whole file.
const MAX_BYTES: usize = 256 * 1024 * 1024;
const MAX_BYTES_PER_TENANT: usize = 64 * 1024 * 1024;

/// Counts the open calls of each tenant and their memory.
#[derive(Debug, Default)]
pub(crate) struct CallLimiter {
    by_tenant: Mutex<HashMap<String, Held>>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Held {
    calls: usize,
    bytes: usize,
}

/// Permission for one call, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct CallPermit {
    limiter: Arc<CallLimiter>,
    tenant: String,
}

/// Permission of a call to hold this much memory, until it is dropped.
#[derive(Debug)]
pub(crate) struct MemoryPermit<'a> {
    call: &'a CallPermit,
    bytes: usize,
}

impl CallLimiter {
    /// Permission for one more call; `None` if there are too many.
    pub(crate) fn try_acquire(self: &Arc<Self>, tenant: &str) -> Option<CallPermit> {
        let mut by_tenant = self.by_tenant.lock();
        let all: usize = by_tenant.values().map(|held| held.calls).sum();
        if all >= MAX_CALLS
            || by_tenant.get(tenant).is_some_and(|own| own.calls >= MAX_CALLS_PER_TENANT)
        {
            return None;
        }
        by_tenant.entry(tenant.to_owned()).or_default().calls += 1;
        Some(CallPermit { limiter: self.clone(), tenant: tenant.to_owned() })
    }
}

impl CallPermit {
    /// Permission to hold this much memory; `None` if other calls hold too much.
    pub(crate) fn try_reserve(&self, bytes: usize) -> Option<MemoryPermit<'_>> {
        let mut by_tenant = self.limiter.by_tenant.lock();
        let all: usize = by_tenant.values().map(|held| held.bytes).sum();
        let own = by_tenant.get_mut(&self.tenant)?;
        if all.saturating_add(bytes) > MAX_BYTES
            || own.bytes.saturating_add(bytes) > MAX_BYTES_PER_TENANT
        {
            return None;
        }
        own.bytes += bytes;
        Some(MemoryPermit { call: self, bytes })
    }
}

impl Drop for MemoryPermit<'_> {
    fn drop(&mut self) {
        if let Some(own) = self.call.limiter.by_tenant.lock().get_mut(&self.call.tenant) {
            own.bytes -= self.bytes;
        }
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        let mut by_tenant = self.limiter.by_tenant.lock();
        match by_tenant.get_mut(&self.tenant) {
            Some(own) if own.calls > 1 => own.calls -= 1,
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
        assert!(limiter.by_tenant.lock().is_empty());
        let many = (0..).map_while(|n: usize| limiter.try_acquire(&(n / 50).to_string()));
        let held: Vec<CallPermit> = many.collect();
        assert_eq!(held.len(), MAX_CALLS);
    }

    #[test]
    fn memory_is_limited_in_total_and_per_tenant() {
        let limiter = Arc::<CallLimiter>::default();
        let calls: Vec<CallPermit> =
            (0..5).filter_map(|tenant| limiter.try_acquire(&format!("{tenant}"))).collect();
        let held = calls[0].try_reserve(MAX_BYTES_PER_TENANT);
        assert!(held.is_some() && calls[0].try_reserve(1).is_none());
        let others: Vec<_> =
            calls[1..].iter().map_while(|call| call.try_reserve(MAX_BYTES_PER_TENANT)).collect();
        assert_eq!(others.len(), 3, "the total is reached");
        drop(held);
        assert!(calls[4].try_reserve(MAX_BYTES_PER_TENANT).is_some());
        drop(others);
        drop(calls);
        assert!(limiter.by_tenant.lock().is_empty());
    }
}
