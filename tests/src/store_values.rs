//! Plain values for tests and benchmarks of the store.

use std::time::Duration;

use codelia_policy::{Limits, LimitsRequest, Policy, RunSpec, SessionFlags, SessionScopes};
use codelia_store::{NewWorker, SessionSpec};
use codelia_types::{CommandSpec, Incarnation, Mode, Outcome, Receipt, RunResult, Usage, WorkerId};
use uuid::Uuid;

/// A worker with four slots in mode `logical`.
#[must_use]
pub fn logical_worker(id: WorkerId, root_id: Uuid, lease_ttl: Duration) -> NewWorker {
    NewWorker {
        address: format!("unix:/{id}"),
        id,
        incarnation: Incarnation::generate(),
        previous: None,
        root_id,
        modes: vec![Mode::Logical],
        watched_modes: vec![],
        slots: 4,
        version: "test".into(),
        lease_ttl,
    }
}

/// A session in mode `logical` with default limits.
#[must_use]
pub fn logical_session() -> SessionSpec {
    SessionSpec {
        mode: Mode::Logical,
        limits: Limits::default(),
        requested_limits: LimitsRequest::default(),
        network: None,
        policy: Policy::default(),
        flags: SessionFlags::default(),
        scopes: SessionScopes::default(),
        profile: None,
    }
}

/// A run of `true` in such a session.
#[must_use]
pub fn logical_run() -> RunSpec {
    RunSpec::new(CommandSpec::new(["true"]), Mode::Logical)
}

/// The result of a run that exited without output.
#[must_use]
pub fn exit(code: i32) -> RunResult {
    RunResult {
        usage: Some(Usage::default()),
        receipt: Some(Receipt::default()),
        sandbox_root: Some("/s".into()),
        setup_time: Some(Duration::from_micros(300)),
        prepared: true,
        watched: vec!["limits.pids".to_owned()],
        output_total: Some(0),
        ..Outcome::Exited(code).into()
    }
}
