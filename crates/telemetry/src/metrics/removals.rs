//! Metrics of removed session directories.

use std::time::Duration;

use opentelemetry::metrics::{Counter, Gauge, Histogram};

use super::instrument::instruments;

instruments! {
    /// The instruments of removed session directories.
    pub struct RemovalMetrics {
        removed: Counter<u64> = "codelia_session_directories_removed",
            "Session directories removed";
        bytes: Counter<u64> = "codelia_session_directories_removed_bytes",
            "Bytes freed by removing session directories";
        latency: Histogram<f64> = "codelia_session_directory_removal",
            "Latency of removing a session directory";
        failures: Counter<u64> = "codelia_session_directory_removal_failures",
            "Failed removals of session directories";
        stuck: Gauge<i64> = "codelia_session_directories_stuck",
            "Session directories whose removal failed and will be retried";
    }
}

impl RemovalMetrics {
    /// Records the removal of a session directory.
    pub fn removed(&self, bytes: u64, latency: Duration) {
        self.removed.record(1, []);
        self.latency.record(latency, []);
        self.bytes.record(bytes, []);
    }

    /// Counts a failed removal of a session directory.
    pub fn failed(&self) {
        self.failures.record(1, []);
    }

    /// Sets the number of session directories whose removal is being retried.
    pub fn stuck(&self, count: i64) {
        self.stuck.record(count, []);
    }
}
