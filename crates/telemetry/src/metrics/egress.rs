//! Metrics of the egress proxy.

use opentelemetry::metrics::{Counter, Gauge};

use super::{instrument::instruments, to_i64};

instruments! {
    /// The instruments of the egress proxy.
    pub struct EgressMetrics {
        attempts: Counter<u64> ["via", "outcome"] = "codelia_egress_attempts",
            "Attempts of runs to reach other hosts, by way in and outcome";
        bytes: Counter<u64> ["direction"] = "codelia_egress_bytes",
            "Bytes that runs exchanged through the egress proxy, by direction";
        sandboxes: Gauge<i64> = "codelia_egress_sandboxes",
            "Sandboxes that the egress proxy serves";
        connections: Gauge<i64> = "codelia_egress_connections",
            "Open connections of runs to the egress proxy";
        restarts: Counter<u64> = "codelia_egress_restarts", "Restarts of the egress proxy";
    }
}

impl EgressMetrics {
    /// Records connections through the egress proxy that have ended, or refused attempts.
    pub fn attempts(
        &self,
        via: &'static str,
        outcome: &'static str,
        count: u64,
        sent: u64,
        received: u64,
    ) {
        self.attempts.record(count, [via.into(), outcome.into()]);
        self.bytes.record(sent, ["sent".into()]);
        self.bytes.record(received, ["received".into()]);
    }

    /// Sets the number of sandboxes that the egress proxy serves.
    pub fn sandboxes(&self, count: usize) {
        self.sandboxes.record(to_i64(count as u64), []);
    }

    /// Sets the number of open connections of the egress proxy.
    pub fn connections(&self, count: usize) {
        self.connections.record(to_i64(count as u64), []);
    }

    /// Counts a restart of the egress proxy.
    pub fn restarted(&self) {
        self.restarts.record(1, []);
    }
}
