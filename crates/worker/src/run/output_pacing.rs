//! When a run's output and outcome are given out: at once, or where its policy asks for it only at multiples of a time, so
//! that who watches cannot tell what happened between them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use codelia_policy::Policy;
use tokio::time::sleep;

use crate::run::stdio::Reader;

/// As much output of a stream is held back; then its command waits.
const MOST_HELD: usize = 1024 * 1024;

/// The times at which something is given out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Release {
    interval: Option<Duration>,
}

impl Release {
    pub(crate) fn of(policy: &Policy) -> Self {
        Self { interval: policy.resources.release_interval_ms.map(Duration::from_millis) }
    }

    /// The longest that something is held back.
    pub(crate) fn interval(self) -> Duration {
        self.interval.unwrap_or_default()
    }

    pub(crate) fn is_at_once(self) -> bool {
        self.interval.is_none()
    }

    /// Waits until something may be given out.
    pub(crate) async fn time(self) {
        let Some(interval) = self.interval else { return };
        // A clock before its epoch has no grid: it is held back as long as can be.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        sleep(now.map_or(interval, |now| until_next(now, interval))).await;
    }

    /// What is to be given out together at the next time: this, and what comes until then.
    pub(crate) async fn collect(self, first: Bytes, reader: &mut Reader) -> Vec<Bytes> {
        let (mut held, mut bytes) = (Vec::new(), first.len());
        held.push(first);
        let time = self.time();
        tokio::pin!(time);
        while bytes < MOST_HELD {
            tokio::select! {
                biased;
                () = &mut time => return held,
                more = reader.read() => match more {
                    Ok(data) if !data.is_empty() => {
                        bytes += data.len();
                        held.push(data);
                    }
                    // Whoever reads next sees it again.
                    _ => break,
                },
            }
        }
        time.await;
        held
    }

    /// A time that was used, as it is told.
    pub(crate) fn rounded(self, used: Duration) -> Duration {
        self.interval.map_or(used, |interval| used + until_next(used, interval))
    }
}

/// From a time to the next multiple of the interval, itself if it is one.
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
    fn every_time_is_followed_by_a_multiple_of_the_interval() {
        let interval = Duration::from_millis(250);
        for nanos in [0, 1, 249_999_999, 250_000_000, 250_000_001, 1_700_000_000_123_456_789] {
            let time = Duration::from_nanos(nanos);
            let next = time + until_next(time, interval);
            assert_eq!(next.as_nanos() % interval.as_nanos(), 0, "{time:?}");
            assert!(next < time + interval);
        }
    }

    #[test]
    fn a_used_time_is_told_no_finer_than_the_interval() {
        let mut policy = Policy::default();
        assert_eq!(Release::of(&policy).rounded(Duration::from_millis(7)), Duration::from_millis(7));
        policy.resources.release_interval_ms = Some(100);
        for (used, told) in [(0, 0), (1, 100), (100, 100), (101, 200)] {
            let rounded = Release::of(&policy).rounded(Duration::from_millis(used));
            assert_eq!(rounded, Duration::from_millis(told));
        }
    }
}
