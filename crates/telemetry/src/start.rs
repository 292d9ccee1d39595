//! The series that exist before anything is counted. An alert on the increase of a counter needs
//! the value 0 first. Histograms and the p95 appear with their first value.

use codelia_types::{LostReason, Mode, Outcome, Reason, Resource};
use opentelemetry::KeyValue;

use crate::{
    Metrics,
    metrics::{DiskCause, DiskEffect, one_label},
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
/// What can refuse a connection.
const CAPS: [&str; 3] =
    ["max_connections", "max_connections_per_address", "metrics.max_connections"];
/// Certificates of a process: of the public API, and of connections between apis and workers.
const CERTIFICATES: [&str; 2] = ["public", "internal"];
/// What a command can violate.
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
                self.requests.add(
                    0,
                    &[KeyValue::new("method", method.clone()), KeyValue::new("code", code)],
                );
            }
        }
        for reason in Reason::ALL {
            self.refusals.add(0, &one_label("reason", reason.as_str()));
        }
        for quota in QUOTAS {
            self.quota_refusals.add(0, &one_label("quota", quota));
        }
        self.escape.add_indicators(0, "FILESYSTEM", "high");
        for result in ["sent", "dropped"] {
            self.escape.add_alerts(0, result);
        }
        self.key_lookups.add(0, &[]);
        self.calls_changed(0);
        self.watchers_changed(0);
    }

    /// Creates the series of a worker. `attempts` to reach other hosts have a way and an outcome.
    pub fn start_worker(&self, attempts: impl IntoIterator<Item = (&'static str, &'static str)>) {
        self.start_process();
        for mode in Mode::ALL.map(Mode::as_str) {
            let labels = one_label("mode", mode);
            self.cpu_seconds.add(0.0, &labels);
            self.read_bytes.add(0, &labels);
            self.written_bytes.add(0, &labels);
            for outcome in Outcome::KINDS {
                self.runs.add(0, &[KeyValue::new("outcome", outcome), KeyValue::new("mode", mode)]);
            }
            for prepared in [true, false] {
                self.sandboxes
                    .add(0, &[KeyValue::new("mode", mode), KeyValue::new("prepared", prepared)]);
            }
        }
        for kind in VIOLATIONS {
            self.violations.add(0, &one_label("kind", kind));
        }
        for (kind, severity) in [
            ("SYSCALL", "low"),
            ("SYSCALL", "critical"),
            ("PROCESS", "critical"),
            ("NETWORK", "high"),
            ("CANARY", "critical"),
            ("ISOLATION_DRIFT", "critical"),
        ] {
            self.escape.add_indicators(0, kind, severity);
        }
        for pattern in SUSPICIOUS {
            self.escape.add_suspicious(0, pattern);
        }
        for resource in Resource::ALL {
            self.near_limits.add(0, &one_label("resource", resource.as_str()));
        }
        for (via, outcome) in attempts {
            self.egress.attempts(via, outcome, 0, 0, 0);
        }
        self.egress.sandboxes(0);
        self.egress.connections(0);
        self.egress.restarts.add(0, &[]);
        for counter in [
            &self.fenced,
            &self.leases_lost,
            &self.removals.removed,
            &self.removals.bytes,
            &self.removals.failures,
            &self.receipts_unclean,
        ] {
            counter.add(0, &[]);
        }
        self.worker(0, 0, 0);
        self.removals.stuck(0);
        for cause in DiskCause::ALL {
            DiskEffect::ALL.into_iter().for_each(|effect| self.disk.add_limited(0, cause, effect));
        }
        self.disk.limits_crossed(0);
        self.disk.used(0, 0);
        self.disk.space(0, 0);
    }

    /// Series of every process. Each may do the upkeep of the installation.
    fn start_process(&self) {
        self.build_info.record(1, &one_label("version", env!("CARGO_PKG_VERSION")));
        for cap in CAPS {
            self.connections_refused.add(0, &one_label("cap", cap));
        }
        for certificate in CERTIFICATES {
            self.certificate_reload_failures.add(0, &one_label("certificate", certificate));
        }
        self.connections_changed(0);
        self.queue(0, std::time::Duration::ZERO);
        self.runs_retried(0);
        for reason in LostReason::ALL {
            self.runs_lost(reason.as_str(), 0);
        }
        self.misplaced_rows(0);
    }
}
