//! An amount of something that file calls share, so that nobody can hold all of it.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use parking_lot::Mutex;

/// An amount that is bounded in total and for each owner. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Budget<K> {
    max: usize,
    max_per_owner: usize,
    /// The amount of each owner. Owners that hold nothing are left out.
    held: Arc<Mutex<HashMap<K, usize>>>,
}

/// A part of a budget, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Share<K: Clone + Eq + Hash> {
    budget: Budget<K>,
    pub(super) owner: K,
    amount: usize,
}

impl<K: Clone + Eq + Hash> Budget<K> {
    pub(super) fn new(max: usize, max_per_owner: usize) -> Self {
        Self { max, max_per_owner, held: Arc::default() }
    }

    /// Takes an amount; `None` if too much is held.
    pub(super) fn try_take(&self, owner: K, amount: usize) -> Option<Share<K>> {
        let mut share = Share { budget: self.clone(), owner, amount: 0 };
        share.try_resize(amount).then_some(share)
    }

    #[cfg(test)]
    pub(super) fn is_free(&self) -> bool {
        self.held.lock().is_empty()
    }
}

impl<K: Clone + Eq + Hash> Share<K> {
    /// Changes the amount; `false` if too much is held. Less is always possible.
    pub(super) fn try_resize(&mut self, amount: usize) -> bool {
        let Budget { max, max_per_owner, held } = &self.budget;
        let mut held = held.lock();
        let own = held.get(&self.owner).copied().unwrap_or_default();
        let all: usize = held.values().sum();
        let more = amount.saturating_sub(self.amount);
        if own.saturating_add(more) > *max_per_owner || all.saturating_add(more) > *max {
            return false;
        }
        match own - self.amount + amount {
            0 => held.remove(&self.owner),
            left => held.insert(self.owner.clone(), left),
        };
        self.amount = amount;
        true
    }
}

impl<K: Clone + Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        self.try_resize(0);
    }
}
