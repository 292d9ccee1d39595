//! Metrics of attempts to escape and of the alerts about them.

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Meter},
};

/// The instruments of attempts to escape and of alerts.
#[derive(Debug)]
pub struct EscapeMetrics {
    indicators: Counter<u64>,
    alerts: Counter<u64>,
    suspicious: Counter<u64>,
}

impl EscapeMetrics {
    pub(super) fn build(meter: &Meter) -> Self {
        let counter = |name, help| meter.u64_counter(name).with_description(help).build();
        Self {
            indicators: counter(
                "codelia_escape_indicators",
                "Signs that a command tries to leave its sandbox, by type and severity",
            ),
            alerts: counter(
                "codelia_alerts",
                "Alerts for the webhook that were sent, or dropped after all attempts",
            ),
            suspicious: counter(
                "codelia_suspicious_operations",
                "Runs whose logged signals or file operations have a suspicious pattern",
            ),
        }
    }

    pub(crate) fn add_indicators(&self, count: u64, kind: &'static str, severity: &'static str) {
        self.indicators
            .add(count, &[KeyValue::new("type", kind), KeyValue::new("severity", severity)]);
    }

    pub(crate) fn add_suspicious(&self, count: u64, pattern: &'static str) {
        self.suspicious.add(count, &[KeyValue::new("pattern", pattern)]);
    }

    pub(crate) fn add_alerts(&self, count: u64, result: &'static str) {
        self.alerts.add(count, &[KeyValue::new("result", result)]);
    }

    /// Counts a sign that a command tries to leave its sandbox.
    pub fn indicator(&self, kind: &'static str, severity: &'static str) {
        self.add_indicators(1, kind, severity);
    }

    /// Counts a run with a suspicious pattern in what was logged of it.
    pub fn suspicious(&self, pattern: &'static str) {
        self.add_suspicious(1, pattern);
    }

    /// Counts an alert that was sent or given up.
    pub fn alert(&self, result: &'static str) {
        self.add_alerts(1, result);
    }
}
