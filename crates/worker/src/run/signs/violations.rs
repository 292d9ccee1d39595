//! The violations of one run: collected while it runs, read by its attached callers.

use codelia_store::{EventBody, EventKind};
use codelia_telemetry::metrics;
use codelia_types::{CountedViolation, Violation, Violations};
use serde_json::json;
use tokio::sync::watch;

/// One run's violations.
#[derive(Debug, Default)]
pub(crate) struct ViolationLog {
    /// Attached callers wait for changes.
    log: watch::Sender<Violations>,
}

impl ViolationLog {
    pub(crate) fn add(&self, violation: Violation) {
        metrics().violation(&violation.kind);
        let syscall = violation.syscall.clone();
        let args = violation.display_args();
        if self.log.send_if_modified(|log| log.add(violation)) {
            tracing::warn!(syscall, args, "system call blocked");
        }
    }

    /// The `index`th distinct violation, in the order in which they first occurred.
    pub(crate) fn get(&self, index: usize) -> Option<CountedViolation> {
        self.log.borrow().seen.get(index).cloned()
    }

    pub(crate) fn all(&self) -> Violations {
        self.log.borrow().clone()
    }

    /// Reports new violations.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Violations> {
        self.log.subscribe()
    }
}

/// The events that record the violations.
pub(crate) fn events(violations: &Violations) -> impl Iterator<Item = EventBody> {
    violations.seen.iter().map(|CountedViolation { violation, count }| EventBody {
        kind: EventKind::SyscallBlocked,
        field: Some(field(violation).to_owned()),
        detail: json!({
            "kind": violation.kind,
            "path": violation.path,
            "syscall": violation.syscall,
            "number": violation.nr,
            "args": violation.args,
            "count": count,
        }),
    })
}

/// The field of the policy that a violation is about.
fn field(violation: &Violation) -> &'static str {
    match violation.kind.as_str() {
        Violation::EXEC_DENIED => "process.allowed_executables",
        _ => "security.syscalls",
    }
}
