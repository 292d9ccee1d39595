//! Keys that this server looked up a moment ago. A call that records a run need not look its key up
//! first: the statement that records the run checks that nothing about the key has changed since.

use std::time::{Duration, Instant};

use codelia_store::{Caller, KeyVersion};

use crate::cache::Cache;

/// How long a key is known. What it may do is checked with every run, so this only bounds how long
/// a key that is in use is not looked up.
const MAX_AGE: Duration = Duration::from_secs(10);

type KeyHash = [u8; 32];

/// A key as it was looked up.
#[derive(Debug, Clone)]
struct KnownKey {
    caller: Caller,
    version: KeyVersion,
    seen_at: Instant,
}

/// The keys that were valid lately.
#[derive(Debug, Default)]
pub(crate) struct KnownKeys(Cache<KeyHash, KnownKey>);

impl KnownKeys {
    /// The caller behind a key that was valid a moment ago.
    pub(crate) fn get(&self, hash: &KeyHash, now: Instant) -> Option<(Caller, KeyVersion)> {
        let known = self.0.get(hash)?;
        (now.duration_since(known.seen_at) < MAX_AGE).then_some((known.caller, known.version))
    }

    /// Remembers a key that is valid.
    pub(crate) fn set(&self, hash: KeyHash, caller: Caller, version: KeyVersion, now: Instant) {
        self.0.insert(hash, KnownKey { caller, version, seen_at: now });
    }

    /// Forgets a key that is not valid, or may not be.
    pub(crate) fn remove(&self, hash: &KeyHash) {
        self.0.remove(hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::layer::tests::caller_with;

    #[test]
    fn key_is_known_for_a_moment() {
        let (keys, hash, now) = (KnownKeys::default(), [1; 32], Instant::now());
        assert!(keys.get(&hash, now).is_none());
        keys.set(hash, caller_with(&[]), KeyVersion { key: 1, tenant: 2, policy: None }, now);
        assert!(keys.get(&hash, now + MAX_AGE / 2).is_some());
        assert!(keys.get(&hash, now + MAX_AGE).is_none());
        assert!(keys.get(&[2; 32], now).is_none());
        keys.remove(&hash);
        assert!(keys.get(&hash, now).is_none());
    }
}
