//! Metrics of the disk space of sessions.

use opentelemetry::{
    KeyValue,
    metrics::{Counter, Gauge, Meter},
};

/// What kept a session from writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskCause {
    /// A limit of the session.
    Session,
    /// The quota of its tenant.
    Tenant,
    /// The reserve of the worker.
    Reserve,
}

/// What became of the run or call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskEffect {
    /// A run was stopped.
    RunStopped,
    /// A run was not started.
    RunRefused,
    /// A file call was refused.
    CallRefused,
}

impl DiskCause {
    pub(crate) const ALL: [Self; 3] = [Self::Session, Self::Tenant, Self::Reserve];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Tenant => "tenant",
            Self::Reserve => "reserve",
        }
    }
}

impl DiskEffect {
    pub(crate) const ALL: [Self; 3] = [Self::RunStopped, Self::RunRefused, Self::CallRefused];

    const fn as_str(self) -> &'static str {
        match self {
            Self::RunStopped => "run_stopped",
            Self::RunRefused => "run_refused",
            Self::CallRefused => "call_refused",
        }
    }
}

/// The instruments of the disk space of sessions.
#[derive(Debug)]
pub struct DiskMetrics {
    used_bytes: Gauge<i64>,
    used_inodes: Gauge<i64>,
    free_bytes: Gauge<i64>,
    reserve_bytes: Gauge<i64>,
    pub(crate) limited: Counter<u64>,
    pub(crate) crossings: Counter<u64>,
}

impl DiskMetrics {
    pub(super) fn build(meter: &Meter) -> Self {
        let counter = |name, help| meter.u64_counter(name).with_description(help).build();
        let gauge = |name, help| meter.i64_gauge(name).with_description(help).build();
        Self {
            used_bytes: gauge(
                "codelia_session_disk_bytes",
                "Bytes that the files of the sessions use that this worker holds",
            ),
            used_inodes: gauge("codelia_session_disk_inodes", "Inodes that these files use"),
            free_bytes: gauge(
                "codelia_disk_free_bytes",
                "Free bytes of the file system that has the sessions of this worker",
            ),
            reserve_bytes: gauge(
                "codelia_disk_reserve_bytes",
                "Bytes that this worker keeps free there (worker.disk_reserve)",
            ),
            limited: counter(
                "codelia_disk_limited",
                "Runs stopped or refused and file calls refused for lack of disk space, by cause and effect",
            ),
            crossings: counter(
                "codelia_disk_limits_crossed",
                "Times that files reached 80 % or 100 % of the limit of a session or the quota of a tenant",
            ),
        }
    }

    pub(crate) fn add_limited(&self, count: u64, cause: DiskCause, effect: DiskEffect) {
        let labels =
            [KeyValue::new("cause", cause.as_str()), KeyValue::new("effect", effect.as_str())];
        self.limited.add(count, &labels);
    }

    /// Sets what the files of the held sessions use.
    pub fn used(&self, bytes: u64, inodes: u64) {
        self.used_bytes.record(to_i64(bytes), &[]);
        self.used_inodes.record(to_i64(inodes), &[]);
    }

    /// Sets what is free, and what of it the worker keeps free.
    pub fn space(&self, free: u64, reserve: u64) {
        self.free_bytes.record(to_i64(free), &[]);
        self.reserve_bytes.record(to_i64(reserve), &[]);
    }

    /// Counts a run or call that could not write.
    pub fn limited(&self, cause: DiskCause, effect: DiskEffect) {
        self.add_limited(1, cause, effect);
    }

    /// Counts sessions and tenants that reached a share of their limit.
    pub fn limits_crossed(&self, count: u64) {
        self.crossings.add(count, &[]);
    }
}

fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
