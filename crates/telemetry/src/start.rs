//! The series that exist before anything is counted. An alert on the increase of a counter needs
//! the value 0 first. Histograms and the p95 appear with their first value.

use std::time::Duration;

use codelia_types::{LostReason, Mode, Outcome, Reason, Resource};

use crate::{
    Metrics,
    metrics::{DiskCause, DiskEffect},
};

/// Codes of calls that exist from the start: success, and failures of the service.
const CODES: [&str; 4] = ["OK", "INTERNAL", "UNAVAILABLE", "UNKNOWN"];
/// The label of calls to unknown paths.
const OTHER_METHOD: &str = "other";
/// The quotas of a tenant.
const QUOTAS: [&str; 8] = [
    "sessions",
    "concurrent_runs",
    "queued_runs",
    "requests_per_second",
    "policy_checks",
    "output_bytes",
    "disk_bytes",
    "volumes",
];
/// Caps that can refuse a connection.
const CAPS: [&str; 3] =
    ["max_connections", "max_connections_per_address", "metrics.max_connections"];
/// Certificates of a process: of the public API, and of connections between apis and workers.
const CERTIFICATES: [&str; 2] = ["public", "internal"];
/// Kinds of violations by commands.
const VIOLATIONS: [&str; 2] = ["SYSCALL_BLOCKED", "EXEC_DENIED"];
/// Patterns in what was logged of a command.
const SUSPICIOUS: [&str; 4] =
    ["many_deletions", "signal_to_all_processes", "signal_to_init", "signals_to_many_processes"];

impl Metrics {
    /// Creates the series of an API server with these methods.
    pub fn start_api(&self, methods: impl IntoIterator<Item = String>) {
        self.start_process();
        for method in methods.into_iter().chain([OTHER_METHOD.to_owned()]) {
            for code in CODES {
                self.requests.record(0, [method.clone().into(), code.into()]);
            }
        }
        for reason in Reason::ALL {
            self.refusals.record(0, [reason.as_str().into()]);
        }
        for quota in QUOTAS {
            self.quota_refusals.record(0, [quota.into()]);
        }
        self.escape.indicators.record(0, ["FILESYSTEM".into(), "high".into()]);
        for result in ["sent", "dropped"] {
            self.escape.alerts.record(0, [result.into()]);
        }
        self.key_lookups.record(0, []);
        self.calls_changed(0);
        self.watchers_changed(0);
    }

    /// Creates the series of a worker. `attempts` to reach other hosts have a way and an outcome.
    pub fn start_worker(&self, attempts: impl IntoIterator<Item = (&'static str, &'static str)>) {
        self.start_process();
        for mode in Mode::ALL.map(Mode::as_str) {
            self.run_used(mode, Duration::ZERO, 0, 0);
            for outcome in Outcome::KINDS {
                self.runs.record(0, [outcome.into(), mode.into()]);
            }
            for prepared in [true, false] {
                self.sandboxes.record(0, [mode.into(), prepared.into()]);
            }
        }
        for kind in VIOLATIONS {
            self.violations.record(0, [kind.into()]);
        }
        for (kind, severity) in [
            ("SYSCALL", "low"),
            ("SYSCALL", "critical"),
            ("PROCESS", "critical"),
            ("NETWORK", "high"),
            ("CANARY", "critical"),
            ("ISOLATION_DRIFT", "critical"),
        ] {
            self.escape.indicators.record(0, [kind.into(), severity.into()]);
        }
        for pattern in SUSPICIOUS {
            self.escape.suspicious.record(0, [pattern.into()]);
        }
        for resource in Resource::ALL {
            self.near_limits.record(0, [resource.as_str().into()]);
        }
        for (via, outcome) in attempts {
            self.egress.attempts(via, outcome, 0, 0, 0);
        }
        self.egress.sandboxes(0);
        self.egress.connections(0);
        self.egress.restarts.record(0, []);
        for counter in [
            &self.fenced,
            &self.leases_lost,
            &self.removals.removed,
            &self.removals.bytes,
            &self.removals.failures,
            &self.receipts_unclean,
        ] {
            counter.record(0, []);
        }
        self.worker(0, 0, 0);
        self.removals.stuck(0);
        for cause in DiskCause::ALL {
            for effect in DiskEffect::ALL {
                self.disk.limited.record(0, [cause.as_str().into(), effect.as_str().into()]);
            }
        }
        self.disk.limits_crossed(0);
        self.disk.used(0, 0);
        self.disk.space(0, 0);
    }

    /// Series of every process. Each may do the upkeep of the installation.
    fn start_process(&self) {
        self.build_info.record(1, [env!("CARGO_PKG_VERSION").into()]);
        for cap in CAPS {
            self.connections_refused.record(0, [cap.into()]);
        }
        for certificate in CERTIFICATES {
            self.certificate_reload_failures.record(0, [certificate.into()]);
        }
        self.connections_changed(0);
        self.queue(0, Duration::ZERO);
        self.runs_retried(0);
        for reason in LostReason::ALL {
            self.runs_lost(reason.as_str(), 0);
        }
        self.misplaced_rows(0);
    }
}
