//! All metrics, by name. Only this module and those below it create instruments.
//!
//! Names and labels are a public contract: dashboards and alerts depend on them.

mod disk;
mod egress;
mod escape;
mod flags;
mod instrument;
mod removals;
mod setup;
mod step;
#[cfg(test)]
mod tests;

use std::{sync::OnceLock, time::Duration};

use opentelemetry::{
    Value, global,
    metrics::{Counter, Gauge, Histogram, UpDownCounter},
};

pub use self::{
    disk::{DiskCause, DiskEffect, DiskMetrics},
    egress::EgressMetrics,
    escape::EscapeMetrics,
    flags::FlagMetrics,
    removals::RemovalMetrics,
    step::Step,
};
use self::{instrument::instruments, setup::SetupPercentile};
use crate::trace;

instruments! {
    /// All instruments.
    pub struct Metrics {
        requests: Counter<u64> ["method", "code"] = "codelia_requests",
            "API requests, by method and gRPC code";
        request_latency: Histogram<f64> ["method"] = "codelia_request",
            "Latency of API requests to the response or first stream message, by method";
        refusals: Counter<u64> ["reason"] = "codelia_refusals", "Refused requests, by reason";
        connections: UpDownCounter<i64> = "codelia_connections",
            "Open connections to the gRPC ports of this process";
        connections_refused: Counter<u64> ["cap"] = "codelia_connections_refused",
            "Connections closed at once because of a cap, by cap";
        certificate_expiry: Gauge<i64> ["certificate"] =
            "codelia_tls_certificate_expiry_timestamp_seconds",
            "When the certificate that this process presents ends, in seconds since 1970, by certificate";
        certificate_reload_failures: Counter<u64> ["certificate"] =
            "codelia_tls_certificate_reload_failures",
            "Changes of certificate files that cannot be used, by certificate";
        calls: UpDownCounter<i64> = "codelia_calls_in_flight",
            "Open calls with a valid key to this API server";
        quota_refusals: Counter<u64> ["quota"] = "codelia_quota_refusals",
            "Requests refused because a tenant reached a quota, by quota";
        key_lookups: Counter<u64> = "codelia_key_lookups", "API keys looked up in the database";
        runs: Counter<u64> ["outcome", "mode"] = "codelia_runs",
            "Finished runs, by outcome and mode";
        runs_lost: Counter<u64> ["reason"] = "codelia_runs_lost",
            "Runs that ended as lost, by reason";
        runs_retried: Counter<u64> = "codelia_runs_retried",
            "Runs of dead workers that were queued again";
        cpu_time: Counter<f64> ["mode"] = "codelia_run_cpu", "CPU time used by runs, by mode";
        read_bytes: Counter<u64> ["mode"] = "codelia_run_read_bytes",
            "Bytes read from devices by runs, by mode";
        written_bytes: Counter<u64> ["mode"] = "codelia_run_written_bytes",
            "Bytes written to files by runs, by mode";
        steps: Histogram<f64> ["step"] = "codelia_run_step",
            "Latency of each step of a run, by step";
        setups: Histogram<f64> ["mode", "prepared"] = "codelia_isolation_setup",
            "Latency from launch request to execve, by mode and whether the sandbox was prepared";
        setup_p95: SetupPercentile = "codelia_isolation_setup_p95",
            "95th percentile of the isolation setup latency over the last 5 minutes, by mode";
        sandboxes: Counter<u64> ["mode", "prepared"] = "codelia_sandboxes",
            "Sandboxes used, by mode and whether they were prepared";
        violations: Counter<u64> ["kind"] = "codelia_violations",
            "Policy violations by commands, by kind";
        near_limits: Counter<u64> ["resource"] = "codelia_runs_near_limit",
            "Runs that used 80 % of a limit, by resource; each run counts once for each";
        queue_depth: Gauge<i64> = "codelia_queue_depth", "Runs waiting for a worker or a slot";
        queue_age: Gauge<f64> = "codelia_queue_age",
            "Age of the oldest run that waits for a worker or a slot";
        misplaced_rows: Gauge<i64> = "codelia_default_partition_rows",
            "Rows of runs and output of days without a partition, up to 10000";
        slots: Gauge<i64> = "codelia_slots", "Runs this worker can execute concurrently";
        slots_busy: Gauge<i64> = "codelia_slots_busy", "Runs this worker is executing";
        leases: Gauge<i64> = "codelia_leases", "Session leases held by this worker";
        fenced: Counter<u64> = "codelia_fenced",
            "Results dropped because the worker had lost the lease";
        leases_lost: Counter<u64> = "codelia_leases_lost",
            "Times this worker lost its lease and killed its runs";
        receipts_unclean: Counter<u64> = "codelia_receipts_unclean",
            "Sandboxes that left processes, mounts, cgroups, sockets or directories behind";
        watchers: UpDownCounter<i64> = "codelia_watchers",
            "Open watch and exec streams of this API server";
        build_info: Gauge<i64> ["version"] = "codelia_build_info",
            "Always 1; the label names the version";
    }
    groups {
        /// Attempts to escape.
        escape: EscapeMetrics,
        /// The egress proxy.
        egress: EgressMetrics,
        /// Mode flags.
        flags: FlagMetrics,
        /// Removed session directories.
        removals: RemovalMetrics,
        /// The disk space of sessions.
        disk: DiskMetrics,
    }
}

/// The instruments of this process. Call it after [`crate::init`]; values recorded before are lost.
pub fn metrics() -> &'static Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| Metrics::build(&global::meter("codelia")))
}

impl Metrics {
    /// Records a completed API request.
    pub fn request(&self, method: &str, code: &str, latency: Duration) {
        let method = Value::from(method.to_owned());
        self.request_latency.record(latency, [method.clone()]);
        self.requests.record(1, [method, code.to_owned().into()]);
    }

    /// Counts a refused request.
    pub fn refused(&self, reason: &'static str) {
        self.refusals.record(1, [reason.into()]);
    }

    /// Counts an opened (`1`) or closed (`-1`) connection.
    pub fn connections_changed(&self, change: i64) {
        self.connections.record(change, []);
    }

    /// Counts a connection that was closed at once because of a cap.
    pub fn connection_refused(&self, cap: &'static str) {
        self.connections_refused.record(1, [cap.into()]);
    }

    /// Sets when a certificate ends, in seconds since 1970.
    pub fn certificate_expires(&self, certificate: &'static str, at: i64) {
        self.certificate_expiry.record(at, [certificate.into()]);
    }

    /// Counts changed certificate files that cannot be used.
    pub fn certificate_reload_failed(&self, certificate: &'static str) {
        self.certificate_reload_failures.record(1, [certificate.into()]);
    }

    /// Counts an opened (`1`) or closed (`-1`) call.
    pub fn calls_changed(&self, change: i64) {
        self.calls.record(change, []);
    }

    /// Counts a request that was refused because of a quota.
    pub fn quota_refused(&self, quota: &str) {
        self.quota_refusals.record(1, [quota.to_owned().into()]);
    }

    /// Counts a key that was looked up in the database.
    pub fn key_lookup(&self) {
        self.key_lookups.record(1, []);
    }

    /// Counts a finished run.
    pub fn run_ended(&self, outcome: &'static str, mode: &'static str) {
        self.runs.record(1, [outcome.into(), mode.into()]);
    }

    /// Counts runs that ended as lost.
    pub fn runs_lost(&self, reason: &'static str, count: u64) {
        self.runs_lost.record(count, [reason.into()]);
    }

    /// Records the resources that a run used.
    pub fn run_used(
        &self,
        mode: &'static str,
        cpu_time: Duration,
        read_bytes: u64,
        written_bytes: u64,
    ) {
        self.cpu_time.record(cpu_time, [mode.into()]);
        self.read_bytes.record(read_bytes, [mode.into()]);
        self.written_bytes.record(written_bytes, [mode.into()]);
    }

    /// Records the latency of one step of a run, also as a span.
    pub fn step(&self, step: Step, latency: Duration) {
        self.steps.record(latency, [step.as_str().into()]);
        trace::step(step.as_str(), latency);
    }

    /// Records the launch of a command.
    pub fn setup(&self, mode: &'static str, prepared: bool, latency: Duration) {
        self.setups.record(latency, [mode.into(), prepared.into()]);
        self.sandboxes.record(1, [mode.into(), prepared.into()]);
        self.setup_p95.record((mode, latency), []);
        self.step(Step::Setup, latency);
    }

    /// Counts a policy violation.
    pub fn violation(&self, kind: &str) {
        self.violations.record(1, [kind.to_owned().into()]);
    }

    /// Counts a run that got near a limit.
    pub fn near_limit(&self, resource: &'static str) {
        self.near_limits.record(1, [resource.into()]);
    }

    /// Sets the number of waiting runs and the age of the oldest.
    pub fn queue(&self, runs: i64, age: Duration) {
        self.queue_depth.record(runs, []);
        self.queue_age.record(age, []);
    }

    /// Counts runs of dead workers that were queued again.
    pub fn runs_retried(&self, count: u64) {
        self.runs_retried.record(count, []);
    }

    /// Sets the number of rows in the default partitions.
    pub fn misplaced_rows(&self, rows: i64) {
        self.misplaced_rows.record(rows, []);
    }

    /// Sets a worker's slots and the number of leases it holds.
    pub fn worker(&self, slots: i64, busy: i64, leases: i64) {
        self.slots.record(slots, []);
        self.slots_busy.record(busy, []);
        self.leases.record(leases, []);
    }

    /// Counts a result dropped because the worker had lost the lease.
    pub fn fenced(&self) {
        self.fenced.record(1, []);
    }

    /// Counts a lost lease.
    pub fn lease_lost(&self) {
        self.leases_lost.record(1, []);
    }

    /// Counts a sandbox that left something behind.
    pub fn receipt_unclean(&self) {
        self.receipts_unclean.record(1, []);
    }

    /// Counts an opened (`1`) or closed (`-1`) watch or exec stream.
    pub fn watchers_changed(&self, change: i64) {
        self.watchers.record(change, []);
    }
}

/// A number of a gauge. One that does not fit becomes the largest that does.
fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Exports a counter that only some builds have, such as those for measurements.
pub fn observe_counter(name: &'static str, description: &'static str, count: fn() -> u64) {
    let meter = global::meter("codelia");
    let counter = meter.u64_observable_counter(name).with_description(description);
    counter.with_callback(move |counter| counter.observe(count(), &[])).build();
}
