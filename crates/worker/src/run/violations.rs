//! What one run tried against its policy: collected while it goes on, read by its watchers.

use std::sync::{Mutex, MutexGuard, PoisonError};

use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use codelia_types::{CountedViolation, Violation, Violations};
use serde_json::json;
use tokio::sync::{mpsc, watch};

/// One run's violations.
#[derive(Debug)]
pub(crate) struct ViolationLog {
    log: Mutex<Violations>,
    /// Watchers wait on it.
    changed: watch::Sender<()>,
}

impl ViolationLog {
    pub(crate) fn new() -> Self {
        Self { log: Mutex::default(), changed: watch::Sender::new(()) }
    }

    /// Collects what the sandbox reports, to its end.
    pub(crate) async fn collect(&self, mut reports: mpsc::Receiver<Violation>) {
        while let Some(violation) = reports.recv().await {
            self.add(violation);
        }
    }

    fn add(&self, violation: Violation) {
        metrics().violation(&violation.kind);
        let (syscall, args) = (violation.syscall.clone(), violation.args);
        if self.lock().add(violation) {
            tracing::warn!(syscall, ?args, "blocked");
            self.changed.send_replace(());
        }
    }

    /// The violation that was the `index`th to be tried first.
    pub(crate) fn get(&self, index: usize) -> Option<CountedViolation> {
        self.lock().seen.get(index).cloned()
    }

    /// All so far.
    pub(crate) fn all(&self) -> Violations {
        self.lock().clone()
    }

    /// Tells a watcher of new ones.
    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    fn lock(&self) -> MutexGuard<'_, Violations> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The events that stand for violations.
pub(crate) fn happenings(violations: &Violations) -> impl Iterator<Item = EventBody> {
    violations.seen.iter().map(|CountedViolation { violation, count }| EventBody {
        kind: EventKind::SyscallBlocked,
        field: Some("security.syscalls".to_owned()),
        detail: json!({
            "syscall": violation.syscall,
            "number": violation.nr,
            "args": violation.args,
            "count": count,
        }),
    })
}
