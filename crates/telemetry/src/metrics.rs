//! The metrics, by name. Nobody else makes an instrument.

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

use crate::latency_window::Windows;

/// Bounds of every latency histogram: 100 µs to 100 s.
const SECONDS: [f64; 19] = [
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
    10.0, 30.0, 100.0,
];

/// A step in the life of a run whose latency is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Authenticate, check, make the specification.
    Admit,
    /// The insert.
    Record,
    /// The push to the lease holder.
    Dispatch,
    /// Waiting for a slot.
    Queue,
    /// Making a sandbox that was not prepared.
    Prepare,
    /// Launch asked for → the command's execve.
    Setup,
    /// The command itself.
    Execute,
    /// The commit of the outcome.
    Commit,
}

impl Step {
    fn as_str(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Record => "record",
            Self::Dispatch => "dispatch",
            Self::Queue => "queue",
            Self::Prepare => "prepare",
            Self::Setup => "setup",
            Self::Execute => "execute",
            Self::Commit => "commit",
        }
    }
}

/// All instruments.
#[derive(Debug)]
pub struct Metrics {
    requests: Counter<u64>,
    request_seconds: Histogram<f64>,
    refusals: Counter<u64>,
    runs: Counter<u64>,
    cpu_seconds: Counter<f64>,
    read_bytes: Counter<u64>,
    written_bytes: Counter<u64>,
    step_seconds: Histogram<f64>,
    setup_seconds: Histogram<f64>,
    setups: Arc<Windows>,
    _setup_p95: ObservableGauge<f64>,
    sandboxes: Counter<u64>,
    violations: Counter<u64>,
    queue_depth: Gauge<i64>,
    slots: Gauge<i64>,
    slots_busy: Gauge<i64>,
    leases: Gauge<i64>,
    fenced: Counter<u64>,
    removed: Counter<u64>,
    removed_bytes: Counter<u64>,
    removal_seconds: Histogram<f64>,
    removal_failures: Counter<u64>,
    removals_stuck: Gauge<i64>,
    receipts_unclean: Counter<u64>,
    watchers: Gauge<i64>,
    watchers_now: AtomicI64,
}

/// The instruments of this process. Call after [`crate::init`]: before it they go nowhere.
pub fn metrics() -> &'static Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| Metrics::build(&global::meter("codelia")))
}

impl Metrics {
    pub(crate) fn build(meter: &Meter) -> Self {
        let setups = Arc::<Windows>::default();
        let counter = |name, about| meter.u64_counter(name).with_description(about).build();
        let gauge = |name, about| meter.i64_gauge(name).with_description(about).build();
        let seconds = |name, about| {
            meter
                .f64_histogram(name)
                .with_description(about)
                .with_unit("s")
                .with_boundaries(SECONDS.to_vec())
                .build()
        };
        Self {
            requests: counter("codelia_requests", "API calls, by method and gRPC code"),
            request_seconds: seconds(
                "codelia_request",
                "API calls: from request to response or first message",
            ),
            refusals: counter("codelia_refusals", "Refused calls, by reason"),
            runs: counter("codelia_runs", "Runs that ended, by outcome and mode"),
            cpu_seconds: meter
                .f64_counter("codelia_run_cpu")
                .with_description("Processor time that runs used, by mode")
                .with_unit("s")
                .build(),
            read_bytes: counter("codelia_run_read_bytes", "Bytes that runs read from devices, by mode"),
            written_bytes: counter("codelia_run_written_bytes", "Bytes that runs wrote to files, by mode"),
            step_seconds: seconds("codelia_run_step", "Latency of each step in the life of a run"),
            setup_seconds: seconds(
                "codelia_isolation_setup",
                "Launch asked for to execve, by mode and prepared",
            ),
            _setup_p95: setup_p95(meter, setups.clone()),
            setups,
            sandboxes: counter("codelia_sandboxes", "Sandboxes that were used, by mode and prepared"),
            violations: counter("codelia_violations", "What commands tried against their policy, by kind"),
            queue_depth: gauge("codelia_queue_depth", "Runs that wait for a worker or a slot"),
            slots: gauge("codelia_slots", "Runs this worker can execute at once"),
            slots_busy: gauge("codelia_slots_busy", "Runs this worker executes"),
            leases: gauge("codelia_leases", "Sessions this worker holds"),
            fenced: counter("codelia_fenced", "Results dropped because the lease was lost"),
            removed: counter("codelia_session_directories_removed", "Session directories removed"),
            removed_bytes: counter(
                "codelia_session_directories_removed_bytes",
                "Bytes in removed session directories",
            ),
            removal_seconds: seconds("codelia_session_directory_removal", "Removals of session directories"),
            removals_stuck: gauge("codelia_session_directories_stuck", "Directories whose removal failed"),
            removal_failures: counter("codelia_session_directory_removal_failures", "Removals that failed"),
            receipts_unclean: counter("codelia_receipts_unclean", "Sandboxes that left something behind"),
            watchers: gauge("codelia_watchers", "Open watch and exec streams of this api"),
            watchers_now: AtomicI64::new(0),
        }
    }

    /// An API call was answered.
    pub fn request(&self, method: &str, code: &str, took: Duration) {
        let method = KeyValue::new("method", method.to_owned());
        self.request_seconds.record(took.as_secs_f64(), std::slice::from_ref(&method));
        self.requests.add(1, &[method, KeyValue::new("code", code.to_owned())]);
    }

    /// A call was refused.
    pub fn refused(&self, reason: &'static str) {
        self.refusals.add(1, &[KeyValue::new("reason", reason)]);
    }

    /// A run ended.
    pub fn run_ended(&self, outcome: &'static str, mode: &'static str) {
        self.runs.add(1, &[KeyValue::new("outcome", outcome), KeyValue::new("mode", mode)]);
    }

    /// A run used this.
    pub fn run_used(&self, mode: &'static str, cpu_time: Duration, read_bytes: u64, written_bytes: u64) {
        let mode = [KeyValue::new("mode", mode)];
        self.cpu_seconds.add(cpu_time.as_secs_f64(), &mode);
        self.read_bytes.add(read_bytes, &mode);
        self.written_bytes.add(written_bytes, &mode);
    }

    /// A step in the life of a run was taken.
    pub fn step(&self, step: Step, took: Duration) {
        self.step_seconds.record(took.as_secs_f64(), &[KeyValue::new("step", step.as_str())]);
    }

    /// A command was launched.
    pub fn setup(&self, mode: &'static str, prepared: bool, took: Duration) {
        let labels = [KeyValue::new("mode", mode), KeyValue::new("prepared", prepared)];
        self.setup_seconds.record(took.as_secs_f64(), &labels);
        self.sandboxes.add(1, &labels);
        self.setups.record(mode, took, Instant::now());
        self.step(Step::Setup, took);
    }

    /// A command tried something against its policy.
    pub fn violation(&self, kind: &str) {
        self.violations.add(1, &[KeyValue::new("kind", kind.to_owned())]);
    }

    /// How many runs wait.
    pub fn queue_depth(&self, runs: i64) {
        self.queue_depth.record(runs, &[]);
    }

    /// A worker's slots, and the sessions it holds.
    pub fn worker(&self, slots: i64, busy: i64, leases: i64) {
        self.slots.record(slots, &[]);
        self.slots_busy.record(busy, &[]);
        self.leases.record(leases, &[]);
    }

    /// A result was dropped because the lease was lost.
    pub fn fenced(&self) {
        self.fenced.add(1, &[]);
    }

    /// A session directory was removed.
    pub fn session_removed(&self, bytes: u64, took: Duration) {
        self.removed.add(1, &[]);
        self.removal_seconds.record(took.as_secs_f64(), &[]);
        self.removed_bytes.add(bytes, &[]);
    }

    /// A session directory could not be removed.
    pub fn session_removal_failed(&self) {
        self.removal_failures.add(1, &[]);
    }

    /// So many session directories could not be removed yet.
    pub fn sessions_stuck(&self, count: i64) {
        self.removals_stuck.record(count, &[]);
    }

    /// A sandbox left something behind.
    pub fn receipt_unclean(&self) {
        self.receipts_unclean.add(1, &[]);
    }

    /// A watch or exec stream was opened (`1`) or closed (`-1`).
    pub fn watchers_changed(&self, by: i64) {
        let now = self.watchers_now.fetch_add(by, Ordering::Relaxed) + by;
        self.watchers.record(now, &[]);
    }
}

/// Asked for when the page is read, so that it falls back when nothing is launched any more.
fn setup_p95(meter: &Meter, setups: Arc<Windows>) -> ObservableGauge<f64> {
    meter
        .f64_observable_gauge("codelia_isolation_setup_p95")
        .with_description("95th percentile of the setup latency over the last five minutes, by mode")
        .with_unit("s")
        .with_callback(move |gauge| {
            for (mode, took) in setups.p95(Instant::now()) {
                gauge.observe(took.as_secs_f64(), &[KeyValue::new("mode", mode)]);
            }
        })
        .build()
}
