//! When a run's output and outcome are released: immediately, or, if the policy asks for it, only
//! at multiples of an interval. Callers cannot measure what happens between two of them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use codelia_policy::Policy;
use tokio::time::sleep;

use super::stdio::Reader;

/// Output of a stream that is held back at most; then the command waits.
const MAX_HELD: usize = 1024 * 1024;

/// The times at which output is released.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputPacing {
    interval: Option<Duration>,
}

impl OutputPacing {
    pub(crate) fn from_policy(policy: &Policy) -> Self {
        Self { interval: policy.resources.release_interval }
    }

    /// How long output is held back at most.
    pub(crate) fn interval(self) -> Duration {
        self.interval.unwrap_or_default()
    }

    pub(crate) fn is_immediate(self) -> bool {
        self.interval.is_none()
    }

    /// Waits for the next release.
    pub(crate) async fn wait(self) {
        let Some(interval) = self.interval else { return };
        // A clock before the epoch has no multiples: waits a full interval.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        sleep(now.map_or(interval, |now| until_next(now, interval))).await;
    }

    /// Waits for the next release and returns `first` with what is read until then.
    pub(crate) async fn collect(self, first: Bytes, reader: &mut Reader) -> Vec<Bytes> {
        let mut held = Vec::new();
        let mut bytes = first.len();
        held.push(first);
        let release = self.wait();
        tokio::pin!(release);
        while bytes < MAX_HELD {
            tokio::select! {
                biased;
                () = &mut release => return held,
                more = reader.read() => match more {
                    Ok(data) if !data.is_empty() => {
                        bytes += data.len();
                        held.push(data);
                    }
                    // The next read returns the end or the error again.
                    _ => break,
                },
            }
        }
        release.await;
        held
    }

    /// A used time, rounded up to the interval.
    pub(crate) fn round_up(self, used: Duration) -> Duration {
        self.interval.map_or(used, |interval| used + until_next(used, interval))
    }
}

/// From `time` to the next multiple of the interval; zero if it is one.
fn until_next(time: Duration, interval: Duration) -> Duration {
    let over = time.as_nanos() % interval.as_nanos().max(1);
    if over == 0 {
        return Duration::ZERO;
    }
    interval.saturating_sub(Duration::from_nanos(u64::try_from(over).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_release_is_multiple_of_interval() {
        let interval = Duration::from_millis(250);
        for nanos in [0, 1, 249_999_999, 250_000_000, 250_000_001, 1_700_000_000_123_456_789] {
            let time = Duration::from_nanos(nanos);
            let next = time + until_next(time, interval);
            assert_eq!(next.as_nanos() % interval.as_nanos(), 0, "{time:?}");
            assert!(next < time + interval);
        }
    }

    #[test]
    fn used_time_is_rounded_up_to_interval() {
        let mut policy = Policy::default();
        assert_eq!(
            OutputPacing::from_policy(&policy).round_up(Duration::from_millis(7)),
            Duration::from_millis(7)
        );
        policy.resources.release_interval = Some(Duration::from_millis(100));
        for (used, expected) in [(0, 0), (1, 100), (100, 100), (101, 200)] {
            let rounded = OutputPacing::from_policy(&policy).round_up(Duration::from_millis(used));
            assert_eq!(rounded, Duration::from_millis(expected));
        }
    }
}
