//! Limits how fast the output of a command is read. Without it, worker and api spend on one run the
//! processor time that other runs need.

use std::time::Duration;

use tokio::time::Instant;

/// Bytes of a stream that are read at any speed.
const BURST_BYTES: u64 = 16 * 1024 * 1024;
/// Bytes of a stream in a second after that.
const BYTES_PER_SECOND: u64 = 32 * 1024 * 1024;

/// The output that a stream has ahead of [`BYTES_PER_SECOND`].
#[derive(Debug)]
pub(crate) struct OutputRate {
    ahead: u64,
    at: Instant,
}

impl OutputRate {
    pub(crate) fn new(now: Instant) -> Self {
        Self { ahead: 0, at: now }
    }

    /// How long to wait before the next read, after this many bytes were read.
    pub(crate) fn delay_after(&mut self, bytes: usize, now: Instant) -> Duration {
        let due =
            (now - self.at).as_nanos().saturating_mul(BYTES_PER_SECOND.into()) / 1_000_000_000;
        let due = u64::try_from(due).unwrap_or(u64::MAX);
        self.ahead = self.ahead.saturating_sub(due).saturating_add(bytes as u64);
        self.at = now;
        let over = self.ahead.saturating_sub(BURST_BYTES);
        Duration::from_micros(over.saturating_mul(1_000_000) / BYTES_PER_SECOND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = 64 * 1024;

    /// Reads without a pause of its own; returns how long it took.
    fn read(rate: &mut OutputRate, begin: Instant, bytes: u64) -> Duration {
        let mut now = begin;
        for _ in 0..bytes / CHUNK as u64 {
            now += rate.delay_after(CHUNK, now);
        }
        now - begin
    }

    #[test]
    fn flood_is_slowed_down_after_a_burst() {
        let begin = Instant::now();
        let mut rate = OutputRate::new(begin);
        assert_eq!(read(&mut rate, begin, BURST_BYTES), Duration::ZERO);
        let took = read(&mut rate, begin, 10 * BYTES_PER_SECOND);
        assert!(took.abs_diff(Duration::from_secs(10)) < Duration::from_millis(10), "{took:?}");
    }

    #[test]
    fn pause_allows_one_more_burst_only() {
        let begin = Instant::now();
        let mut rate = OutputRate::new(begin);
        read(&mut rate, begin, 2 * BURST_BYTES);
        let later = begin + Duration::from_secs(3600);
        assert_eq!(read(&mut rate, later, BURST_BYTES), Duration::ZERO);
        assert!(read(&mut rate, later, BYTES_PER_SECOND) > Duration::from_millis(990));
    }

    #[test]
    fn steady_output_below_the_rate_never_waits() {
        let begin = Instant::now();
        let mut rate = OutputRate::new(begin);
        let step = Duration::from_secs(1) * u32::try_from(CHUNK).unwrap()
            / u32::try_from(BYTES_PER_SECOND).unwrap();
        for number in 1..100_000 {
            assert_eq!(rate.delay_after(CHUNK, begin + step * number), Duration::ZERO);
        }
    }
}
