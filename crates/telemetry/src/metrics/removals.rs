//! Metrics of removed session directories.

use std::time::Duration;

use opentelemetry::metrics::{Counter, Gauge, Histogram, Meter};

use super::latency::latency;

/// The instruments of removed session directories.
#[derive(Debug)]
pub struct RemovalMetrics {
    pub(crate) removed: Counter<u64>,
    pub(crate) bytes: Counter<u64>,
    seconds: Histogram<f64>,
    pub(crate) failures: Counter<u64>,
    stuck: Gauge<i64>,
}

impl RemovalMetrics {
    pub(super) fn build(meter: &Meter) -> Self {
        let counter = |name, help| meter.u64_counter(name).with_description(help).build();
        let stuck = meter.i64_gauge("codelia_session_directories_stuck");
        Self {
            removed: counter("codelia_session_directories_removed", "Session directories removed"),
            bytes: counter(
                "codelia_session_directories_removed_bytes",
                "Bytes freed by removing session directories",
            ),
            seconds: latency(
                meter,
                "codelia_session_directory_removal",
                "Latency of removing a session directory",
            ),
            failures: counter(
                "codelia_session_directory_removal_failures",
                "Failed removals of session directories",
            ),
            stuck: stuck
                .with_description("Session directories whose removal failed and will be retried")
                .build(),
        }
    }

    /// Records the removal of a session directory.
    pub fn removed(&self, bytes: u64, latency: Duration) {
        self.removed.add(1, &[]);
        self.seconds.record(latency.as_secs_f64(), &[]);
        self.bytes.add(bytes, &[]);
    }

    /// Counts a failed removal of a session directory.
    pub fn failed(&self) {
        self.failures.add(1, &[]);
    }

    /// Sets the number of session directories whose removal is being retried.
    pub fn stuck(&self, count: i64) {
        self.stuck.record(count, &[]);
    }
}
