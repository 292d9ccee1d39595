//! All metrics, by name. Only this module and those below it create instruments.
//!
//! Names and labels are a public contract: dashboards and alerts depend on them.

mod disk;
mod egress;
mod escape;
mod flags;
mod latency;
mod removals;
mod step;

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use opentelemetry::{
    KeyValue, global,
    metrics::{Counter, Gauge, Histogram, Meter, ObservableGauge},
};

use self::latency::latency;
pub use self::{
    disk::{DiskCause, DiskEffect, DiskMetrics},
    egress::EgressMetrics,
    escape::EscapeMetrics,
    flags::FlagMetrics,
    removals::RemovalMetrics,
    step::Step,
};
use crate::{latency_window::LatencyWindows, trace};

/// All instruments.
#[derive(Debug)]
pub struct Metrics {
    pub(crate) requests: Counter<u64>,
    request_seconds: Histogram<f64>,
    pub(crate) refusals: Counter<u64>,
    connections: Gauge<i64>,
    open_connections: AtomicI64,
    pub(crate) connections_refused: Counter<u64>,
    certificate_expiry: Gauge<i64>,
    pub(crate) certificate_reload_failures: Counter<u64>,
    calls: Gauge<i64>,
    open_calls: AtomicI64,
    pub(crate) quota_refusals: Counter<u64>,
    pub(crate) key_lookups: Counter<u64>,
    pub(crate) runs: Counter<u64>,
    pub(crate) runs_lost: Counter<u64>,
    pub(crate) runs_retried: Counter<u64>,
    pub(crate) cpu_seconds: Counter<f64>,
    pub(crate) read_bytes: Counter<u64>,
    pub(crate) written_bytes: Counter<u64>,
    step_seconds: Histogram<f64>,
    setup_seconds: Histogram<f64>,
    setups: Arc<LatencyWindows>,
    _setup_p95: ObservableGauge<f64>,
    pub(crate) sandboxes: Counter<u64>,
    pub(crate) violations: Counter<u64>,
    /// Attempts to escape.
    pub escape: EscapeMetrics,
    pub(crate) near_limits: Counter<u64>,
    /// The egress proxy.
    pub egress: EgressMetrics,
    /// Mode flags.
    pub flags: FlagMetrics,
    queue_depth: Gauge<i64>,
    queue_age: Gauge<f64>,
    misplaced_rows: Gauge<i64>,
    slots: Gauge<i64>,
    slots_busy: Gauge<i64>,
    leases: Gauge<i64>,
    pub(crate) fenced: Counter<u64>,
    pub(crate) leases_lost: Counter<u64>,
    /// Removed session directories.
    pub removals: RemovalMetrics,
    /// The disk space of sessions.
    pub disk: DiskMetrics,
    pub(crate) receipts_unclean: Counter<u64>,
    watchers: Gauge<i64>,
    open_watchers: AtomicI64,
    pub(crate) build_info: Gauge<i64>,
}

fn cpu_seconds(meter: &Meter) -> Counter<f64> {
    let counter = meter.f64_counter("codelia_run_cpu").with_unit("s");
    counter.with_description("CPU time used by runs, by mode").build()
}

fn queue_age(meter: &Meter) -> Gauge<f64> {
    let gauge = meter.f64_gauge("codelia_queue_age").with_unit("s");
    gauge.with_description("Age of the oldest run that waits for a worker or a slot").build()
}

/// The instruments of this process. Call it after [`crate::init`]; values recorded before are lost.
pub fn metrics() -> &'static Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| Metrics::build(&global::meter("codelia")))
}

impl Metrics {
    pub(crate) fn build(meter: &Meter) -> Self {
        let setups = Arc::<LatencyWindows>::default();
        let counter = |name, help| meter.u64_counter(name).with_description(help).build();
        let gauge = |name, help| meter.i64_gauge(name).with_description(help).build();
        let seconds = |name, help| latency(meter, name, help);
        Self {
            requests: counter("codelia_requests", "API requests, by method and gRPC code"),
            request_seconds: seconds(
                "codelia_request",
                "Latency of API requests to the response or first stream message, by method",
            ),
            refusals: counter("codelia_refusals", "Refused requests, by reason"),
            connections: gauge(
                "codelia_connections",
                "Open connections to the gRPC ports of this process",
            ),
            open_connections: AtomicI64::new(0),
            connections_refused: counter(
                "codelia_connections_refused",
                "Connections closed at once because of a cap, by cap",
            ),
            certificate_expiry: gauge(
                "codelia_tls_certificate_expiry_timestamp_seconds",
                "When the certificate that this process presents ends, in seconds since 1970, by certificate",
            ),
            certificate_reload_failures: counter(
                "codelia_tls_certificate_reload_failures",
                "Changes of certificate files that cannot be used, by certificate",
            ),
            calls: gauge(
                "codelia_calls_in_flight",
                "Open calls with a valid key to this API server",
            ),
            open_calls: AtomicI64::new(0),
            quota_refusals: counter(
                "codelia_quota_refusals",
                "Requests refused because a tenant reached a quota, by quota",
            ),
            key_lookups: counter("codelia_key_lookups", "API keys looked up in the database"),
            runs: counter("codelia_runs", "Finished runs, by outcome and mode"),
            runs_lost: counter("codelia_runs_lost", "Runs that ended as lost, by reason"),
            runs_retried: counter(
                "codelia_runs_retried",
                "Runs of dead workers that were queued again",
            ),
            cpu_seconds: cpu_seconds(meter),
            read_bytes: counter(
                "codelia_run_read_bytes",
                "Bytes read from devices by runs, by mode",
            ),
            written_bytes: counter(
                "codelia_run_written_bytes",
                "Bytes written to files by runs, by mode",
            ),
            step_seconds: seconds("codelia_run_step", "Latency of each step of a run, by step"),
            setup_seconds: seconds(
                "codelia_isolation_setup",
                "Latency from launch request to execve, by mode and whether the sandbox was prepared",
            ),
            _setup_p95: setup_p95(meter, setups.clone()),
            setups,
            sandboxes: counter(
                "codelia_sandboxes",
                "Sandboxes used, by mode and whether they were prepared",
            ),
            violations: counter("codelia_violations", "Policy violations by commands, by kind"),
            escape: EscapeMetrics::build(meter),
            near_limits: counter(
                "codelia_runs_near_limit",
                "Runs that used 80 % of a limit, by resource; each run counts once for each",
            ),
            egress: EgressMetrics::build(meter),
            flags: FlagMetrics::build(meter),
            queue_depth: gauge("codelia_queue_depth", "Runs waiting for a worker or a slot"),
            queue_age: queue_age(meter),
            misplaced_rows: gauge(
                "codelia_default_partition_rows",
                "Rows of runs and output of days without a partition, up to 10000",
            ),
            slots: gauge("codelia_slots", "Runs this worker can execute concurrently"),
            slots_busy: gauge("codelia_slots_busy", "Runs this worker is executing"),
            leases: gauge("codelia_leases", "Session leases held by this worker"),
            fenced: counter(
                "codelia_fenced",
                "Results dropped because the worker had lost the lease",
            ),
            leases_lost: counter(
                "codelia_leases_lost",
                "Times this worker lost its lease and killed its runs",
            ),
            removals: RemovalMetrics::build(meter),
            disk: DiskMetrics::build(meter),
            receipts_unclean: counter(
                "codelia_receipts_unclean",
                "Sandboxes that left processes, mounts, cgroups, sockets or directories behind",
            ),
            watchers: gauge("codelia_watchers", "Open watch and exec streams of this API server"),
            open_watchers: AtomicI64::new(0),
            build_info: gauge("codelia_build_info", "Always 1; the label names the version"),
        }
    }

    /// Records a completed API request.
    pub fn request(&self, method: &str, code: &str, latency: Duration) {
        let method = KeyValue::new("method", method.to_owned());
        self.request_seconds.record(latency.as_secs_f64(), std::slice::from_ref(&method));
        self.requests.add(1, &[method, KeyValue::new("code", code.to_owned())]);
    }

    /// Counts a refused request.
    pub fn refused(&self, reason: &'static str) {
        self.refusals.add(1, &[KeyValue::new("reason", reason)]);
    }

    /// Counts an opened (`1`) or closed (`-1`) connection.
    pub fn connections_changed(&self, change: i64) {
        let open = self.open_connections.fetch_add(change, Ordering::Relaxed) + change;
        self.connections.record(open, &[]);
    }

    /// Counts a connection that was closed at once because of a cap.
    pub fn connection_refused(&self, cap: &'static str) {
        self.connections_refused.add(1, &[KeyValue::new("cap", cap)]);
    }

    /// Sets when a certificate ends, in seconds since 1970.
    pub fn certificate_expires(&self, certificate: &'static str, at: i64) {
        self.certificate_expiry.record(at, &[KeyValue::new("certificate", certificate)]);
    }

    /// Counts changed certificate files that cannot be used.
    pub fn certificate_reload_failed(&self, certificate: &'static str) {
        self.certificate_reload_failures.add(1, &[KeyValue::new("certificate", certificate)]);
    }

    /// Counts an opened (`1`) or closed (`-1`) call.
    pub fn calls_changed(&self, change: i64) {
        let open = self.open_calls.fetch_add(change, Ordering::Relaxed) + change;
        self.calls.record(open, &[]);
    }

    /// Counts a request that was refused because of a quota.
    pub fn quota_refused(&self, quota: &str) {
        self.quota_refusals.add(1, &[KeyValue::new("quota", quota.to_owned())]);
    }

    /// Counts a key that was looked up in the database.
    pub fn key_lookup(&self) {
        self.key_lookups.add(1, &[]);
    }

    /// Counts a finished run.
    pub fn run_ended(&self, outcome: &'static str, mode: &'static str) {
        self.runs.add(1, &[KeyValue::new("outcome", outcome), KeyValue::new("mode", mode)]);
    }

    /// Counts runs that ended as lost.
    pub fn runs_lost(&self, reason: &'static str, count: u64) {
        self.runs_lost.add(count, &[KeyValue::new("reason", reason)]);
    }

    /// Records the resources that a run used.
    pub fn run_used(
        &self,
        mode: &'static str,
        cpu_time: Duration,
        read_bytes: u64,
        written_bytes: u64,
    ) {
        let mode = [KeyValue::new("mode", mode)];
        self.cpu_seconds.add(cpu_time.as_secs_f64(), &mode);
        self.read_bytes.add(read_bytes, &mode);
        self.written_bytes.add(written_bytes, &mode);
    }

    /// Records the latency of one step of a run, also as a span.
    pub fn step(&self, step: Step, latency: Duration) {
        self.step_seconds.record(latency.as_secs_f64(), &[KeyValue::new("step", step.as_str())]);
        trace::step(step.as_str(), latency);
    }

    /// Records the launch of a command.
    pub fn setup(&self, mode: &'static str, prepared: bool, latency: Duration) {
        let labels = [KeyValue::new("mode", mode), KeyValue::new("prepared", prepared)];
        self.setup_seconds.record(latency.as_secs_f64(), &labels);
        self.sandboxes.add(1, &labels);
        self.setups.record(mode, latency, Instant::now());
        self.step(Step::Setup, latency);
    }

    /// Counts a policy violation.
    pub fn violation(&self, kind: &str) {
        self.violations.add(1, &[KeyValue::new("kind", kind.to_owned())]);
    }

    /// Counts a run that got near a limit.
    pub fn near_limit(&self, resource: &'static str) {
        self.near_limits.add(1, &[KeyValue::new("resource", resource)]);
    }

    /// Sets the number of waiting runs and the age of the oldest.
    pub fn queue(&self, runs: i64, age: Duration) {
        self.queue_depth.record(runs, &[]);
        self.queue_age.record(age.as_secs_f64(), &[]);
    }

    /// Counts runs of dead workers that were queued again.
    pub fn runs_retried(&self, count: u64) {
        self.runs_retried.add(count, &[]);
    }

    /// Sets the number of rows in the default partitions.
    pub fn misplaced_rows(&self, rows: i64) {
        self.misplaced_rows.record(rows, &[]);
    }

    /// Sets a worker's slots and the number of leases it holds.
    pub fn worker(&self, slots: i64, busy: i64, leases: i64) {
        self.slots.record(slots, &[]);
        self.slots_busy.record(busy, &[]);
        self.leases.record(leases, &[]);
    }

    /// Counts a result dropped because the worker had lost the lease.
    pub fn fenced(&self) {
        self.fenced.add(1, &[]);
    }

    /// Counts a lost lease.
    pub fn lease_lost(&self) {
        self.leases_lost.add(1, &[]);
    }

    /// Counts a sandbox that left something behind.
    pub fn receipt_unclean(&self) {
        self.receipts_unclean.add(1, &[]);
    }

    /// Counts an opened (`1`) or closed (`-1`) watch or exec stream.
    pub fn watchers_changed(&self, change: i64) {
        let open = self.open_watchers.fetch_add(change, Ordering::Relaxed) + change;
        self.watchers.record(open, &[]);
    }
}

pub(crate) fn one_label(name: &'static str, value: &'static str) -> [KeyValue; 1] {
    [KeyValue::new(name, value)]
}

/// Exports a counter that only some builds have, such as those for measurements.
pub fn observe_counter(name: &'static str, description: &'static str, count: fn() -> u64) {
    let meter = global::meter("codelia");
    let counter = meter.u64_observable_counter(name).with_description(description);
    counter.with_callback(move |counter| counter.observe(count(), &[])).build();
}

/// Computed on each scrape, so that the value expires when no more commands are launched.
fn setup_p95(meter: &Meter, setups: Arc<LatencyWindows>) -> ObservableGauge<f64> {
    meter
        .f64_observable_gauge("codelia_isolation_setup_p95")
        .with_description(
            "95th percentile of the isolation setup latency over the last 5 minutes, by mode",
        )
        .with_unit("s")
        .with_callback(move |gauge| {
            for (mode, latency) in setups.p95(Instant::now()) {
                gauge.observe(latency.as_secs_f64(), &[KeyValue::new("mode", mode)]);
            }
        })
        .build()
}
