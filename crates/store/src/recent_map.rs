//! A map of bounded size that forgets the entries that were not used lately.

use std::{collections::HashMap, hash::Hash, mem};

/// Keeps at least the `capacity` entries used last, and at most twice as many.
#[derive(Debug)]
pub struct RecentMap<K, V> {
    capacity: usize,
    recent: HashMap<K, V>,
    /// Entries not used since `recent` was full; dropped when it is full again.
    older: HashMap<K, V>,
}

impl<K: Hash + Eq + Clone, V> RecentMap<K, V> {
    /// An empty map.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, recent: HashMap::new(), older: HashMap::new() }
    }

    /// Returns an entry and marks it as used.
    pub fn get(&mut self, key: &K) -> Option<&mut V> {
        if let Some(value) = self.older.remove(key) {
            self.insert(key.clone(), value);
        }
        self.recent.get_mut(key)
    }

    /// Inserts an entry or replaces its value.
    pub fn insert(&mut self, key: K, value: V) {
        self.older.remove(&key);
        if self.recent.len() >= self.capacity && !self.recent.contains_key(&key) {
            self.older = mem::take(&mut self.recent);
        }
        self.recent.insert(key, value);
    }

    /// Removes an entry.
    pub fn remove(&mut self, key: &K) {
        self.recent.remove(key);
        self.older.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_entries_stay_and_others_are_forgotten() {
        let mut map = RecentMap::new(10);
        map.insert(0, "kept");
        map.insert(1, "unused");
        for key in 2..1000 {
            map.insert(key, "");
            assert_eq!(map.get(&0), Some(&mut "kept"));
            assert!(map.recent.len() + map.older.len() <= 20);
        }
        assert_eq!(map.get(&1), None);
        map.remove(&0);
        assert_eq!(map.get(&0), None);
    }
}
