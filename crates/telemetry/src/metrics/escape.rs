//! Metrics of attempts to escape and of the alerts about them.

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Meter},
};

use super::Metrics;

#[derive(Debug)]
pub(crate) struct EscapeMetrics {
    indicators: Counter<u64>,
    alerts: Counter<u64>,
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
        }
    }

    pub(crate) fn add_indicators(&self, count: u64, kind: &'static str, severity: &'static str) {
        self.indicators.add(count, &[KeyValue::new("type", kind), KeyValue::new("severity", severity)]);
    }

    pub(crate) fn add_alerts(&self, count: u64, result: &'static str) {
        self.alerts.add(count, &[KeyValue::new("result", result)]);
    }
}

impl Metrics {
    /// Counts a sign that a command tries to leave its sandbox.
    pub fn escape_indicator(&self, kind: &'static str, severity: &'static str) {
        self.escape.add_indicators(1, kind, severity);
    }

    /// Counts an alert that was sent or given up.
    pub fn alert(&self, result: &'static str) {
        self.escape.add_alerts(1, result);
    }
}
