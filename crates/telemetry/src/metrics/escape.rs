//! Metrics of attempts to escape and of the alerts about them.

use opentelemetry::metrics::Counter;

use super::instrument::instruments;

instruments! {
    /// The instruments of attempts to escape and of alerts.
    pub struct EscapeMetrics {
        indicators: Counter<u64> ["type", "severity"] = "codelia_escape_indicators",
            "Signs that a command tries to leave its sandbox, by type and severity";
        alerts: Counter<u64> ["result"] = "codelia_alerts",
            "Alerts for the webhook that were sent, or dropped after all attempts";
        suspicious: Counter<u64> ["pattern"] = "codelia_suspicious_operations",
            "Runs whose logged signals or file operations have a suspicious pattern";
    }
}

impl EscapeMetrics {
    /// Counts a sign that a command tries to leave its sandbox.
    pub fn indicator(&self, kind: &'static str, severity: &'static str) {
        self.indicators.record(1, [kind.into(), severity.into()]);
    }

    /// Counts a run with a suspicious pattern in what was logged of it.
    pub fn suspicious(&self, pattern: &'static str) {
        self.suspicious.record(1, [pattern.into()]);
    }

    /// Counts an alert that was sent or given up.
    pub fn alert(&self, result: &'static str) {
        self.alerts.record(1, [result.into()]);
    }
}
