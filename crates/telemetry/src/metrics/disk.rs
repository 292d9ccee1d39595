//! Metrics of the disk space of sessions.

use codelia_types::words;
use opentelemetry::metrics::{Counter, Gauge};

use super::{instrument::instruments, to_i64};

words! {
    /// A reason why a session could not write.
    pub enum DiskCause {
        /// A limit of the session.
        Session = "session",
        /// The quota of its tenant.
        Tenant = "tenant",
        /// The reserve of the worker.
        Reserve = "reserve",
    }
}

words! {
    /// The end of a run or call that could not write.
    pub enum DiskEffect {
        /// A run was stopped.
        RunStopped = "run_stopped",
        /// A run was not started.
        RunRefused = "run_refused",
        /// A file call was refused.
        CallRefused = "call_refused",
    }
}

instruments! {
    /// The instruments of the disk space of sessions.
    pub struct DiskMetrics {
        used_bytes: Gauge<i64> = "codelia_session_disk_bytes",
            "Bytes that the files of the sessions use that this worker holds";
        used_inodes: Gauge<i64> = "codelia_session_disk_inodes", "Inodes that these files use";
        free_bytes: Gauge<i64> = "codelia_disk_free_bytes",
            "Free bytes of the file system that has the sessions of this worker";
        reserve_bytes: Gauge<i64> = "codelia_disk_reserve_bytes",
            "Bytes that this worker keeps free there (worker.disk_reserve)";
        limited: Counter<u64> ["cause", "effect"] = "codelia_disk_limited",
            "Runs stopped or refused and file calls refused for lack of disk space, by cause and effect";
        crossings: Counter<u64> = "codelia_disk_limits_crossed",
            "Times that files reached 80 % or 100 % of the limit of a session or the quota of a tenant";
    }
}

impl DiskMetrics {
    /// Sets what the files of the held sessions use.
    pub fn used(&self, bytes: u64, inodes: u64) {
        self.used_bytes.record(to_i64(bytes), []);
        self.used_inodes.record(to_i64(inodes), []);
    }

    /// Sets what is free, and what of it the worker keeps free.
    pub fn space(&self, free: u64, reserve: u64) {
        self.free_bytes.record(to_i64(free), []);
        self.reserve_bytes.record(to_i64(reserve), []);
    }

    /// Counts a run or call that could not write.
    pub fn limited(&self, cause: DiskCause, effect: DiskEffect) {
        self.limited.record(1, [cause.as_str().into(), effect.as_str().into()]);
    }

    /// Counts sessions and tenants that reached a share of their limit.
    pub fn limits_crossed(&self, count: u64) {
        self.crossings.record(count, []);
    }
}
