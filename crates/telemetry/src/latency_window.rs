//! Sliding windows over recent latencies, bounded by count and by age.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The number of latencies kept for each label.
const MAX_SAMPLES: usize = 1024;
/// The age at which a latency no longer counts.
const MAX_AGE: Duration = Duration::from_secs(300);

/// Recent latencies by label.
#[derive(Debug, Default)]
pub(crate) struct LatencyWindows(Mutex<BTreeMap<&'static str, VecDeque<(Instant, Duration)>>>);

impl LatencyWindows {
    /// Adds a latency and drops the oldest one of a full window.
    pub(crate) fn record(&self, label: &'static str, latency: Duration, now: Instant) {
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = windows.entry(label).or_default();
        if window.len() == MAX_SAMPLES {
            window.pop_front();
        }
        window.push_back((now, latency));
    }

    /// The 95th percentile of each label with recent latencies.
    pub(crate) fn p95(&self, now: Instant) -> Vec<(&'static str, Duration)> {
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let percentiles = windows.iter_mut().filter_map(|(label, window)| {
            window.retain(|(recorded, _)| now.duration_since(*recorded) < MAX_AGE);
            let mut sorted: Vec<Duration> = window.iter().map(|(_, latency)| *latency).collect();
            sorted.sort_unstable();
            // Nearest rank: the smallest value that at least 95 % of the values do not exceed.
            let rank = (sorted.len() * 95).div_ceil(100).checked_sub(1)?;
            Some((*label, *sorted.get(rank)?))
        });
        percentiles.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_a_recorded_value_per_label() {
        let (windows, now) = (LatencyWindows::default(), Instant::now());
        for millis in 1..=100 {
            windows.record("bwrap", Duration::from_millis(millis), now);
        }
        windows.record("nsjail", Duration::from_millis(7), now);
        let expected = [("bwrap", Duration::from_millis(95)), ("nsjail", Duration::from_millis(7))];
        assert_eq!(windows.p95(now), expected);
    }

    #[test]
    fn old_and_surplus_latencies_do_not_count() {
        let (windows, start) = (LatencyWindows::default(), Instant::now());
        windows.record("bwrap", Duration::from_secs(9), start);
        for _ in 0..MAX_SAMPLES {
            windows.record("bwrap", Duration::from_millis(1), start);
        }
        assert_eq!(windows.p95(start), [("bwrap", Duration::from_millis(1))]);
        assert_eq!(windows.p95(start + MAX_AGE), []);
    }
}
