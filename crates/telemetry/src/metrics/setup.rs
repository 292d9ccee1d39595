//! The 95th percentile of setup latencies, over a window that is bounded by count and by age.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use opentelemetry::{
    KeyValue,
    metrics::{Meter, ObservableGauge},
};
use parking_lot::Mutex;

use super::instrument::Instrument;

/// The number of latencies kept for each mode.
const MAX_SAMPLES: usize = 1024;
/// The age at which a latency no longer counts.
const MAX_AGE: Duration = Duration::from_secs(300);

/// Computed on each scrape, so that the value expires when no more commands are launched.
#[derive(Debug)]
pub(crate) struct SetupPercentile {
    windows: Arc<LatencyWindows>,
    _gauge: ObservableGauge<f64>,
}

impl Instrument for SetupPercentile {
    /// A mode and the latency of a setup in it.
    type Amount = (&'static str, Duration);

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        let windows = Arc::<LatencyWindows>::default();
        let observed = windows.clone();
        let gauge = meter.f64_observable_gauge(name).with_description(help).with_unit("s");
        let gauge = gauge.with_callback(move |gauge| {
            for (mode, latency) in observed.p95(Instant::now()) {
                gauge.observe(latency.as_secs_f64(), &[KeyValue::new("mode", mode)]);
            }
        });
        Self { windows, _gauge: gauge.build() }
    }

    fn record(&self, (mode, latency): Self::Amount, _: &[KeyValue]) {
        self.windows.record(mode, latency, Instant::now());
    }
}

/// Recent latencies by mode.
#[derive(Debug, Default)]
struct LatencyWindows(Mutex<BTreeMap<&'static str, VecDeque<(Instant, Duration)>>>);

impl LatencyWindows {
    /// Adds a latency and drops the oldest one of a full window.
    fn record(&self, mode: &'static str, latency: Duration, now: Instant) {
        let mut windows = self.0.lock();
        let window = windows.entry(mode).or_default();
        if window.len() == MAX_SAMPLES {
            window.pop_front();
        }
        window.push_back((now, latency));
    }

    /// The 95th percentile of each mode with recent latencies.
    fn p95(&self, now: Instant) -> Vec<(&'static str, Duration)> {
        let mut windows = self.0.lock();
        let percentiles = windows.iter_mut().filter_map(|(mode, window)| {
            window.retain(|(recorded, _)| now.duration_since(*recorded) < MAX_AGE);
            let mut sorted: Vec<Duration> = window.iter().map(|(_, latency)| *latency).collect();
            sorted.sort_unstable();
            // Nearest rank: the smallest value that at least 95 % of the values do not exceed.
            let rank = (sorted.len() * 95).div_ceil(100).checked_sub(1)?;
            Some((*mode, *sorted.get(rank)?))
        });
        percentiles.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_a_recorded_value_per_mode() {
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
