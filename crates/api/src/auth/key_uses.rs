//! Records the last use of keys, at most once a minute for each key: no call waits for it.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_store::{Caller, RecentMap, Store};
use codelia_telemetry::task;
use codelia_types::KeyId;

/// How long this server does not record a key again, whatever the store says.
const INTERVAL: Duration = Duration::from_secs(60);
/// Keys to remember.
const CAPACITY: usize = 4096;

/// The keys whose use this server recorded lately.
#[derive(Debug)]
pub(crate) struct KeyUses {
    recorded: Mutex<RecentMap<KeyId, Instant>>,
}

impl Default for KeyUses {
    fn default() -> Self {
        Self { recorded: Mutex::new(RecentMap::new(CAPACITY)) }
    }
}

impl KeyUses {
    /// Records in the background that a key is used, unless this server did so lately.
    pub(crate) fn record(&self, store: &Store, caller: &Caller) {
        if !self.is_due(caller.key, Instant::now()) {
            return;
        }
        let (store, tenant, key) = (store.clone(), caller.tenant.clone(), caller.key);
        task::background("key use", async move {
            if let Err(error) = store.key_touch(&tenant, key).await {
                tracing::warn!(%error, %key, "cannot record the use of a key");
            }
        });
    }

    /// Whether a use must be recorded; the next call within the interval must not.
    fn is_due(&self, key: KeyId, now: Instant) -> bool {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = recorded.get(&key).is_none_or(|at| now.duration_since(*at) >= INTERVAL);
        if is_due {
            recorded.insert(key, now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_recorded_once_a_minute() {
        let (uses, key, now) = (KeyUses::default(), KeyId::generate(), Instant::now());
        assert!(uses.is_due(key, now));
        assert!(!uses.is_due(key, now + INTERVAL / 2));
        assert!(uses.is_due(KeyId::generate(), now), "each key counts for itself");
        assert!(uses.is_due(key, now + INTERVAL));
    }
}
