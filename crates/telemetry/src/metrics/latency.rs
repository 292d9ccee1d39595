//! Histograms of latencies.

use opentelemetry::metrics::{Histogram, Meter};

/// Bucket bounds of every latency histogram: 100 µs to 100 s.
const BUCKETS: [f64; 19] = [
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 5.0, 10.0, 30.0, 100.0,
];

/// A histogram of latencies.
pub(super) fn latency(meter: &Meter, name: &'static str, help: &'static str) -> Histogram<f64> {
    let histogram = meter.f64_histogram(name).with_description(help).with_unit("s");
    histogram.with_boundaries(BUCKETS.to_vec()).build()
}
