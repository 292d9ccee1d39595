//! Metrics of the egress proxy.

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Meter},
};

/// The instruments of the egress proxy.
#[derive(Debug)]
pub struct EgressMetrics {
    attempts: Counter<u64>,
    bytes: Counter<u64>,
    sandboxes: Gauge<i64>,
    connections: Gauge<i64>,
    pub(crate) restarts: Counter<u64>,
}

impl EgressMetrics {
    pub(super) fn build(meter: &Meter) -> Self {
        let counter = |name, help| meter.u64_counter(name).with_description(help).build();
        let gauge = |name, help| meter.i64_gauge(name).with_description(help).build();
        Self {
            attempts: counter(
                "codelia_egress_attempts",
                "Attempts of runs to reach other hosts, by way in and outcome",
            ),
            bytes: counter(
                "codelia_egress_bytes",
                "Bytes that runs exchanged through the egress proxy, by direction",
            ),
            sandboxes: gauge("codelia_egress_sandboxes", "Sandboxes that the egress proxy serves"),
            connections: gauge(
                "codelia_egress_connections",
                "Open connections of runs to the egress proxy",
            ),
            restarts: counter("codelia_egress_restarts", "Restarts of the egress proxy"),
        }
    }

    /// Records connections through the egress proxy that have ended, or refused attempts.
    pub fn attempts(
        &self,
        via: &'static str,
        outcome: &'static str,
        count: u64,
        sent: u64,
        received: u64,
    ) {
        self.attempts.add(count, &[KeyValue::new("via", via), KeyValue::new("outcome", outcome)]);
        self.bytes.add(sent, &[KeyValue::new("direction", "sent")]);
        self.bytes.add(received, &[KeyValue::new("direction", "received")]);
    }

    /// Sets the number of sandboxes that the egress proxy serves.
    pub fn sandboxes(&self, count: usize) {
        self.sandboxes.record(i64::try_from(count).unwrap_or(i64::MAX), &[]);
    }

    /// Sets the number of open connections of the egress proxy.
    pub fn connections(&self, count: usize) {
        self.connections.record(i64::try_from(count).unwrap_or(i64::MAX), &[]);
    }

    /// Counts a restart of the egress proxy.
    pub fn restarted(&self) {
        self.restarts.add(1, &[]);
    }
}
