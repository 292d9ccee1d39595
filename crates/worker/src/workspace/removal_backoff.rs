//! Failed removals of session directories, and when each is retried: less and less often.

use std::{collections::HashMap, time::Duration};

use codelia_telemetry::backoff::Backoff;
use codelia_types::SessionId;
use parking_lot::Mutex;
use tokio::time::Instant;

const MIN_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(300);

/// The sessions whose last removal failed.
#[derive(Debug, Default)]
pub(crate) struct RemovalBackoff(Mutex<HashMap<SessionId, Retry>>);

#[derive(Debug)]
struct Retry {
    backoff: Backoff,
    due: Instant,
}

impl RemovalBackoff {
    /// Whether the removal may be tried now.
    pub(crate) fn is_due(&self, id: SessionId) -> bool {
        self.0.lock().get(&id).is_none_or(|retry| retry.due <= Instant::now())
    }

    pub(crate) fn failed(&self, id: SessionId) {
        let now = Instant::now();
        let mut retries = self.0.lock();
        let first = || Retry { backoff: Backoff::new(MIN_DELAY, MAX_DELAY), due: now };
        let retry = retries.entry(id).or_insert_with(first);
        retry.due = now + retry.backoff.next_delay();
    }

    pub(crate) fn succeeded(&self, id: SessionId) {
        self.0.lock().remove(&id);
    }

    /// How many sessions could not be removed.
    pub(crate) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failing_removal_is_retried_less_and_less_often() {
        let (removals, id) = (RemovalBackoff::default(), SessionId::generate());
        assert!(removals.is_due(id));
        let mut delay = MIN_DELAY;
        for _ in 0..12 {
            removals.failed(id);
            // Delays vary by a fifth.
            tokio::time::advance(delay.mul_f64(0.79)).await;
            assert!(!removals.is_due(id), "before {delay:?}");
            tokio::time::advance(delay.mul_f64(0.42)).await;
            assert!(removals.is_due(id), "after {delay:?}");
            delay = (delay * 2).min(MAX_DELAY);
        }
        assert_eq!(removals.count(), 1);
        removals.succeeded(id);
        assert_eq!(removals.count(), 0);
    }
}
