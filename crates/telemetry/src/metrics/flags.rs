//! Metrics of mode flags.

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Meter},
};

/// The instruments of mode flags. An installation has at most 100 flags.
#[derive(Debug)]
pub struct FlagMetrics {
    percent: Gauge<i64>,
    sessions: Counter<u64>,
    sessions_refused: Counter<u64>,
    runs: Counter<u64>,
    rollbacks: Counter<u64>,
}

impl FlagMetrics {
    pub(super) fn build(meter: &Meter) -> Self {
        let counter = |name, help| meter.u64_counter(name).with_description(help).build();
        let percent = meter.i64_gauge("codelia_flag_percent");
        Self {
            percent: percent
                .with_description(
                    "Share of sessions that a mode flag is about, by flag and mode; 0 if off",
                )
                .build(),
            sessions: counter(
                "codelia_flag_sessions",
                "Sessions whose mode a flag chose, by flag and mode",
            ),
            sessions_refused: counter(
                "codelia_flag_sessions_refused",
                "Sessions that were refused because of a flag, by flag",
            ),
            runs: counter(
                "codelia_flag_runs",
                "Runs in the mode that a flag chose, by flag and result",
            ),
            rollbacks: counter("codelia_flag_rollbacks", "Rollbacks of flags, by flag and cause"),
        }
    }

    /// Sets the share of sessions that a mode flag is about. The mode is empty if it sets only a
    /// floor.
    pub fn percent(&self, flag: &str, mode: &'static str, percent: u8) {
        let labels = [KeyValue::new("flag", flag.to_owned()), KeyValue::new("mode", mode)];
        self.percent.record(percent.into(), &labels);
    }

    /// Counts a session whose mode a flag chose.
    pub fn session(&self, flag: &str, mode: &'static str) {
        self.sessions
            .add(1, &[KeyValue::new("flag", flag.to_owned()), KeyValue::new("mode", mode)]);
    }

    /// Counts a session that was refused because of a flag.
    pub fn session_refused(&self, flag: &str) {
        self.sessions_refused.add(1, &[KeyValue::new("flag", flag.to_owned())]);
    }

    /// Counts a run in the mode that a flag chose: `started`, `refused` or `failed`.
    pub fn run(&self, flag: &str, result: &'static str) {
        self.runs
            .add(1, &[KeyValue::new("flag", flag.to_owned()), KeyValue::new("result", result)]);
    }

    /// Counts a rollback of a flag, by an `operator` or its `guard`.
    pub fn rolled_back(&self, flag: &str, by: &'static str) {
        self.rollbacks.add(1, &[KeyValue::new("flag", flag.to_owned()), KeyValue::new("by", by)]);
    }
}
