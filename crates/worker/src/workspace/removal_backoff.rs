//! Removals that failed, and when each is tried again: soon at first, then ever later.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use codelia_types::SessionId;
use tokio::time::Instant;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(300);

/// The removals that failed last time.
#[derive(Debug, Default)]
pub(crate) struct Retries(Mutex<HashMap<SessionId, Retry>>);

#[derive(Debug)]
struct Retry {
    pause: Duration,
    due: Instant,
}

impl Retries {
    /// Whether it is time to try.
    pub(crate) fn is_due(&self, id: SessionId) -> bool {
        self.lock().get(&id).is_none_or(|retry| retry.due <= Instant::now())
    }

    /// It failed once more.
    pub(crate) fn failed(&self, id: SessionId) {
        let mut retries = self.lock();
        let pause = retries.get(&id).map_or(FIRST, |retry| (retry.pause * 2).min(LONGEST));
        retries.insert(id, Retry { pause, due: Instant::now() + pause });
    }

    /// It is done.
    pub(crate) fn succeeded(&self, id: SessionId) {
        self.lock().remove(&id);
    }

    /// How many failed last time.
    pub(crate) fn count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Retry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_removal_that_fails_is_tried_ever_later_but_never_given_up() {
        let (retries, id) = (Retries::default(), SessionId::generate());
        assert!(retries.is_due(id));
        let mut pause = FIRST;
        for _ in 0..12 {
            retries.failed(id);
            tokio::time::advance(pause - Duration::from_millis(1)).await;
            assert!(!retries.is_due(id), "before {pause:?}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(retries.is_due(id), "after {pause:?}");
            pause = (pause * 2).min(LONGEST);
        }
        assert_eq!(retries.count(), 1);
        retries.succeeded(id);
        assert_eq!(retries.count(), 0);
    }
}
