//! A sliding window over latencies: the last few, and none that is old.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The most that are kept for each label.
const MOST: usize = 1024;
/// How long each counts.
const AGE: Duration = Duration::from_secs(300);

/// Recent latencies by label.
#[derive(Debug, Default)]
pub(crate) struct Windows(Mutex<BTreeMap<&'static str, VecDeque<(Instant, Duration)>>>);

impl Windows {
    /// Adds one.
    pub(crate) fn record(&self, label: &'static str, took: Duration, now: Instant) {
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let window = windows.entry(label).or_default();
        if window.len() == MOST {
            window.pop_front();
        }
        window.push_back((now, took));
    }

    /// The 95th percentile of each label that has any.
    pub(crate) fn p95(&self, now: Instant) -> Vec<(&'static str, Duration)> {
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = windows.iter_mut().filter_map(|(label, window)| {
            window.retain(|(at, _)| now.duration_since(*at) < AGE);
            let mut all: Vec<Duration> = window.iter().map(|(_, took)| *took).collect();
            all.sort_unstable();
            // Nearest rank: the smallest that at least 95 of 100 do not exceed.
            let rank = (all.len() * 95).div_ceil(100).checked_sub(1)?;
            Some((*label, *all.get(rank)?))
        });
        recent.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_one_that_was_measured_and_each_label_has_its_own() {
        let (windows, now) = (Windows::default(), Instant::now());
        for millis in 1..=100 {
            windows.record("bwrap", Duration::from_millis(millis), now);
        }
        windows.record("nsjail", Duration::from_millis(7), now);
        let expected = [("bwrap", Duration::from_millis(95)), ("nsjail", Duration::from_millis(7))];
        assert_eq!(windows.p95(now), expected);
    }

    #[test]
    fn what_is_old_or_long_past_does_not_count() {
        let (windows, then) = (Windows::default(), Instant::now());
        windows.record("bwrap", Duration::from_secs(9), then);
        for _ in 0..MOST {
            windows.record("bwrap", Duration::from_millis(1), then);
        }
        assert_eq!(windows.p95(then), [("bwrap", Duration::from_millis(1))]);
        assert_eq!(windows.p95(then + AGE), []);
    }
}
