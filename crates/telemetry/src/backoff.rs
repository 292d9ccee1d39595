//! Retry delays: one exponential backoff and one jitter for the whole workspace.

use std::{ops::Range, time::Duration};

use rand::Rng;

/// How far a jittered delay may deviate from the given one.
const JITTER: Range<f64> = 0.8..1.2;

/// Changes a delay by up to 20 % at random, so that processes that started together do not keep
/// acting at the same time.
#[must_use]
pub fn jittered(delay: Duration) -> Duration {
    delay.mul_f64(rand::rng().random_range(JITTER))
}

/// Delays between retries: each is about twice as long as the one before, up to a maximum.
///
/// ```
/// use codelia_telemetry::backoff::Backoff;
/// use std::time::Duration;
///
/// let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
/// let first = backoff.next_delay();
/// assert!(first >= Duration::from_millis(40) && first <= Duration::from_millis(60));
/// backoff.reset(); // after a success
/// ```
#[derive(Debug, Clone)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// The first delay is about `min`; none is longer than `max`.
    #[must_use]
    pub fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, next: min.min(max) }
    }

    /// Returns the next delay, jittered, and doubles the one after it.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = delay.saturating_mul(2).min(self.max);
        jittered(delay).min(self.max)
    }

    /// Starts again at the shortest delay.
    pub fn reset(&mut self) {
        self.next = self.min.min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Duration = Duration::from_millis(100);
    const MAX: Duration = Duration::from_secs(1);

    fn assert_about(delay: Duration, expected: Duration) {
        assert!(delay >= expected.mul_f64(0.8), "{delay:?} is too short for {expected:?}");
        assert!(delay <= expected.mul_f64(1.2), "{delay:?} is too long for {expected:?}");
    }

    #[test]
    fn jitter_stays_within_a_fifth() {
        let delays: Vec<Duration> = (0..1000).map(|_| jittered(MAX)).collect();
        delays.iter().for_each(|delay| assert_about(*delay, MAX));
        assert!(delays.iter().any(|delay| *delay < MAX) && delays.iter().any(|delay| *delay > MAX));
        assert_eq!(jittered(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn delays_double_up_to_the_maximum() {
        let mut backoff = Backoff::new(MIN, MAX);
        for factor in [1, 2, 4, 8] {
            assert_about(backoff.next_delay(), MIN * factor);
        }
        for _ in 0..1000 {
            let delay = backoff.next_delay();
            assert_about(delay, MAX);
            assert!(delay <= MAX, "{delay:?} exceeds the maximum");
        }
    }

    #[test]
    fn reset_starts_again_at_the_minimum() {
        let mut backoff = Backoff::new(MIN, MAX);
        for _ in 0..5 {
            backoff.next_delay();
        }
        backoff.reset();
        assert_about(backoff.next_delay(), MIN);
    }

    #[test]
    fn minimum_above_maximum_is_capped() {
        let mut backoff = Backoff::new(MAX, MIN);
        assert!(backoff.next_delay() <= MIN);
        backoff.reset();
        assert!(backoff.next_delay() <= MIN);
    }

    #[test]
    fn huge_delay_does_not_overflow() {
        let (min, max) = (Duration::from_secs(u64::MAX / 4), Duration::from_secs(u64::MAX / 2));
        let mut backoff = Backoff::new(min, max);
        assert!((0..5).all(|_| backoff.next_delay() <= max));
    }
}
