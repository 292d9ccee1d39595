//! The sessions with paths outside their workspace that were recorded lately.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_store::RecentMap;
use codelia_types::SessionId;

/// Between two records of a session.
const INTERVAL: Duration = Duration::from_secs(60);
/// Sessions to remember.
const CAPACITY: usize = 4096;
/// When sessions were recorded lately.
#[derive(Debug)]
pub(crate) struct Traversals(Mutex<RecentMap<SessionId, Instant>>);

impl Default for Traversals {
    fn default() -> Self {
        Self(Mutex::new(RecentMap::new(CAPACITY)))
    }
}

impl Traversals {
    /// Whether a session may be recorded now.
    pub(super) fn is_due(&self, session: SessionId, now: Instant) -> bool {
        let mut recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.get(&session).is_some_and(|at| now.duration_since(*at) < INTERVAL) {
            return false;
        }
        recorded.insert(session, now);
        true
    }

    /// A record that could not be stored does not count.
    pub(super) fn forget(&self, session: SessionId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_is_recorded_once_a_minute() {
        let (traversals, now) = (Traversals::default(), Instant::now());
        let (one, other) = (SessionId::generate(), SessionId::generate());
        assert!(traversals.is_due(one, now) && traversals.is_due(other, now));
        assert!(!traversals.is_due(one, now + Duration::from_secs(59)));
        assert!(traversals.is_due(one, now + INTERVAL));
        traversals.forget(other);
        assert!(traversals.is_due(other, now));
    }
}
