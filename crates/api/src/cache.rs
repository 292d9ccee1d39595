//! What this server remembers for a while: copies of rows, and what it did lately. Both are bounded
//! and forget the entries that were not used for the longest time.

use std::{
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use codelia_store::RecentMap;

/// A bounded map behind a lock.
#[derive(Debug)]
pub(crate) struct Cache<K, V, const CAPACITY: usize = 4096>(Mutex<RecentMap<K, V>>);

impl<K: Hash + Eq + Clone, V, const CAPACITY: usize> Default for Cache<K, V, CAPACITY> {
    fn default() -> Self {
        Self(Mutex::new(RecentMap::new(CAPACITY)))
    }
}

impl<K: Hash + Eq + Clone, V, const CAPACITY: usize> Cache<K, V, CAPACITY> {
    /// A copy of an entry, which counts as used.
    pub(crate) fn get(&self, key: &K) -> Option<V>
    where
        V: Clone,
    {
        self.lock().get(key).cloned()
    }

    /// Adds an entry or replaces it.
    pub(crate) fn insert(&self, key: K, value: V) {
        self.lock().insert(key, value);
    }

    /// Forgets an entry.
    pub(crate) fn remove(&self, key: &K) {
        self.lock().remove(key);
    }

    /// The map itself, for what needs more than one step.
    pub(crate) fn lock(&self) -> MutexGuard<'_, RecentMap<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Things to do at most once in an interval for each key.
#[derive(Debug)]
pub(crate) struct Recently<K> {
    interval: Duration,
    done: Cache<K, Instant>,
}

impl<K: Hash + Eq + Clone> Recently<K> {
    pub(crate) fn new(interval: Duration) -> Self {
        Self { interval, done: Cache::default() }
    }

    /// Whether it is time to do it. Then it counts as done, until [`Recently::forget`].
    pub(crate) fn is_due(&self, key: K, now: Instant) -> bool {
        let mut done = self.done.lock();
        let is_due = done.get(&key).is_none_or(|at| now.duration_since(*at) >= self.interval);
        if is_due {
            done.insert(key, now);
        }
        is_due
    }

    /// Whether it was done lately.
    pub(crate) fn is_done(&self, key: &K, now: Instant) -> bool {
        self.done.get(key).is_some_and(|at| now.duration_since(at) < self.interval)
    }

    /// Makes it due again: it was begun and failed.
    pub(crate) fn forget(&self, key: &K) {
        self.done.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_due_once_in_an_interval() {
        let interval = Duration::from_secs(60);
        let recently = Recently::new(interval);
        let now = Instant::now();
        assert!(!recently.is_done(&1, now));
        assert!(recently.is_due(1, now) && recently.is_due(2, now), "each counts for itself");
        assert!(!recently.is_due(1, now + Duration::from_secs(59)));
        assert!(recently.is_done(&1, now + interval / 2) && !recently.is_done(&1, now + interval));
        assert!(recently.is_due(1, now + interval));
        recently.forget(&2);
        assert!(recently.is_due(2, now));
    }
}
