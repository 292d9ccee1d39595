//! Limits open file calls: each holds descriptors and some hold memory, and no tenant may hold them
//! all.

use super::budget::{Budget, Share};

const MAX_CALLS: usize = 256;
const MAX_CALLS_PER_TENANT: usize = 64;
/// The memory of calls that hold a whole file.
const MAX_BYTES: usize = 256 * 1024 * 1024;
const MAX_BYTES_PER_TENANT: usize = 64 * 1024 * 1024;
/// An archive counts as this many calls: it holds more descriptors and memory than others.
const ARCHIVE_WEIGHT: usize = 8;

/// Counts the open calls of each tenant and their memory.
#[derive(Debug)]
pub(crate) struct CallLimiter {
    calls: Budget<String>,
    bytes: Budget<String>,
}

/// Permission for one call, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct CallPermit {
    call: Share<String>,
    bytes: Budget<String>,
}

/// The share of a call in something that calls share, until this is dropped.
pub(crate) type CallShare = Share<String>;

impl Default for CallLimiter {
    fn default() -> Self {
        Self {
            calls: Budget::new(MAX_CALLS, MAX_CALLS_PER_TENANT),
            bytes: Budget::new(MAX_BYTES, MAX_BYTES_PER_TENANT),
        }
    }
}

impl CallLimiter {
    /// Permission for one more call; `None` if there are too many.
    pub(crate) fn try_acquire(&self, tenant: &str) -> Option<CallPermit> {
        let call = self.calls.try_take(tenant.to_owned(), 1)?;
        Some(CallPermit { call, bytes: self.bytes.clone() })
    }

    /// Permission for an archive, in addition to that of its call.
    pub(crate) fn try_acquire_archive(&self, tenant: &str) -> Option<CallShare> {
        self.calls.try_take(tenant.to_owned(), ARCHIVE_WEIGHT - 1)
    }
}

impl CallPermit {
    /// Permission to hold this much memory; `None` if other calls hold too much.
    pub(crate) fn try_reserve(&self, bytes: usize) -> Option<CallShare> {
        self.bytes.try_take(self.call.owner.clone(), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_limited_in_total_and_per_tenant() {
        let limiter = CallLimiter::default();
        let held: Vec<CallPermit> = std::iter::from_fn(|| limiter.try_acquire("greedy")).collect();
        assert_eq!(held.len(), MAX_CALLS_PER_TENANT);
        let other = limiter.try_acquire("other");
        assert!(other.is_some());
        drop((held, other));
        assert!(limiter.try_acquire("greedy").is_some());
        assert!(limiter.calls.is_free());
        let many = (0..).map_while(|n: usize| limiter.try_acquire(&(n / 50).to_string()));
        let held: Vec<CallPermit> = many.collect();
        assert_eq!(held.len(), MAX_CALLS);
    }

    #[test]
    fn memory_is_limited_in_total_and_per_tenant() {
        let limiter = CallLimiter::default();
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
        assert!(limiter.calls.is_free() && limiter.bytes.is_free());
    }
}
