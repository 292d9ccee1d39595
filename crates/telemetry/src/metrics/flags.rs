//! Metrics of mode flags.

use opentelemetry::metrics::{Counter, Gauge};

use super::instrument::instruments;

instruments! {
    /// The instruments of mode flags. An installation has at most 100 flags.
    pub struct FlagMetrics {
        percent: Gauge<i64> ["flag", "mode"] = "codelia_flag_percent",
            "Share of sessions that a mode flag is about, by flag and mode; 0 if off";
        sessions: Counter<u64> ["flag", "mode"] = "codelia_flag_sessions",
            "Sessions whose mode a flag chose, by flag and mode";
        sessions_refused: Counter<u64> ["flag"] = "codelia_flag_sessions_refused",
            "Sessions that were refused because of a flag, by flag";
        runs: Counter<u64> ["flag", "result"] = "codelia_flag_runs",
            "Runs in the mode that a flag chose, by flag and result";
        rollbacks: Counter<u64> ["flag", "by"] = "codelia_flag_rollbacks",
            "Rollbacks of flags, by flag and cause";
    }
}

impl FlagMetrics {
    /// Sets the share of sessions that a mode flag is about. The mode is empty if it sets only a
    /// floor.
    pub fn percent(&self, flag: &str, mode: &'static str, percent: u8) {
        self.percent.record(percent.into(), [flag.to_owned().into(), mode.into()]);
    }

    /// Counts a session whose mode a flag chose.
    pub fn session(&self, flag: &str, mode: &'static str) {
        self.sessions.record(1, [flag.to_owned().into(), mode.into()]);
    }

    /// Counts a session that was refused because of a flag.
    pub fn session_refused(&self, flag: &str) {
        self.sessions_refused.record(1, [flag.to_owned().into()]);
    }

    /// Counts a run in the mode that a flag chose: `started`, `refused` or `failed`.
    pub fn run(&self, flag: &str, result: &'static str) {
        self.runs.record(1, [flag.to_owned().into(), result.into()]);
    }

    /// Counts a rollback of a flag, by an `operator` or its `guard`.
    pub fn rolled_back(&self, flag: &str, by: &'static str) {
        self.rollbacks.record(1, [flag.to_owned().into(), by.into()]);
    }
}
