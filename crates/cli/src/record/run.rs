//! Runs and what they used, changed and left, as JSON.

use codelia_policy::IsolationLevel;
use codelia_proto::v1;
use codelia_types::{Mode, NetworkMode};
use serde_json::{Value, json};

use super::{mode, nanos, non_empty, timestamp};
use crate::exit_status;

/// The full record of a run.
pub(crate) fn run(run: &v1::Run) -> Value {
    json!({
        "run_id": run.run_id,
        "session_id": run.session_id,
        "worker_id": non_empty(&run.worker_id),
        "state": run_state(run),
        "waiting_for_approval": non_empty(&run.waiting_for_approval),
        "command": run.command.as_ref().map(|command| &command.argv),
        "command_truncated": run.command.as_ref().is_some_and(|command| command.argv_truncated),
        "env_names": run.command.as_ref().map(|command| &command.env_names),
        "secret_env_names": run.command.as_ref().map(|command| &command.secret_env_names),
        "sandbox_mode": mode(run.mode()),
        "isolation": isolation(run.mode()),
        "level": run.level().to_level().map(IsolationLevel::as_str),
        "tool": non_empty(&run.tool),
        "network": run.network().to_mode().map(NetworkMode::as_str),
        "sandbox_root": non_empty(&run.sandbox_root),
        "cancel_reason": non_empty(&run.cancel_reason),
        "outcome": run.outcome.as_ref().map(exit_status::name),
        "detail": run.outcome.as_ref().and_then(exit_status::detail),
        "exit_code": run.outcome.as_ref().map(exit_status::exit_code),
        "create_time": timestamp(run.create_time.as_ref()),
        "start_time": timestamp(run.start_time.as_ref()),
        "end_time": timestamp(run.end_time.as_ref()),
        "setup_ns": nanos(run.setup_time.as_ref()),
        "usage": run.usage.as_ref().map(usage),
        "violations": run.violations.iter().map(violation).collect::<Vec<_>>(),
        "violation_count": run.violation_count,
        "transaction": transaction(run.transaction()),
        "changes": run.changes.as_ref().map(changes),
        "receipt": run.receipt.as_ref().map(receipt),
        "output_bytes": run.output_bytes,
        "output_truncated": run.output_truncated,
        "output_total_bytes": run.output_total_bytes,
        "unenforced": run.unenforced,
        "watched": run.watched,
        "attempt": run.attempt,
        "labels": run.labels,
    })
}

fn transaction(mode: v1::TransactionMode) -> Option<&'static str> {
    match mode {
        v1::TransactionMode::Unspecified => None,
        v1::TransactionMode::Apply => Some("apply"),
        v1::TransactionMode::Preview => Some("preview"),
        v1::TransactionMode::Hold => Some("hold"),
    }
}

/// What a transactional run changed.
pub(crate) fn changes(changes: &v1::Changes) -> Value {
    json!({
        "state": changes_state(changes.state()),
        "added": changes.added,
        "changed": changes.changed,
        "removed": changes.removed,
        "expire_time": timestamp(changes.expire_time.as_ref()),
        "entries": changes.entries.iter().map(change).collect::<Vec<_>>(),
    })
}

/// Whether changes are in the workspace.
pub(crate) fn changes_state(state: v1::ChangesState) -> &'static str {
    match state {
        v1::ChangesState::Applied => "applied",
        v1::ChangesState::Held => "held",
        v1::ChangesState::Dropped | v1::ChangesState::Unspecified => "dropped",
    }
}

fn change(change: &v1::Change) -> Value {
    json!({
        "kind": change_kind(change.kind()),
        "type": changed_file(change.file_kind()),
        "path": change.path,
        "size_bytes": change.size_bytes,
    })
}

/// What happened to a file.
pub(crate) fn change_kind(kind: v1::ChangeKind) -> &'static str {
    match kind {
        v1::ChangeKind::Added => "added",
        v1::ChangeKind::Changed | v1::ChangeKind::Unspecified => "changed",
        v1::ChangeKind::Removed => "removed",
    }
}

/// The type of a changed file.
pub(crate) fn changed_file(kind: v1::FileKind) -> &'static str {
    match kind {
        v1::FileKind::Regular => "file",
        v1::FileKind::Directory => "directory",
        v1::FileKind::Symlink => "symlink",
        v1::FileKind::Special | v1::FileKind::Unspecified => "special",
    }
}

/// A run with what it uses now.
pub(crate) fn run_with_usage(found: &v1::GetRunResponse) -> Value {
    let mut json = found.run.as_ref().map_or(Value::Null, run);
    json["live_usage"] = found.live_usage.as_ref().map_or(Value::Null, live_usage);
    json["live_usage_unavailable"] = json!(non_empty(&found.live_usage_unavailable));
    json
}

/// A process of a run.
pub(crate) fn run_process((run, process): &(String, v1::RunProcess)) -> Value {
    json!({
        "run_id": run,
        "pid": process.pid,
        "parent_pid": process.parent_pid,
        "state": process.state,
        "cpu_time_ns": nanos(process.cpu_time.as_ref()),
        "memory_bytes": process.memory_bytes,
        "threads": process.threads,
        "command": process.command,
    })
}

/// Name of a run's state.
pub(crate) fn run_state(run: &v1::Run) -> &'static str {
    match run.state() {
        v1::RunState::Unspecified => "unknown",
        v1::RunState::Queued => "queued",
        v1::RunState::Running => "running",
        v1::RunState::Ended => "ended",
    }
}

/// Mode `logical` provides no isolation.
fn isolation(mode: v1::SandboxMode) -> Option<&'static str> {
    mode.to_mode().map(|mode| if mode == Mode::Logical { "none" } else { mode.as_str() })
}

fn usage(usage: &v1::Usage) -> Value {
    json!({
        "cpu_ns": nanos(usage.cpu_time.as_ref()),
        "peak_memory_bytes": usage.peak_memory_bytes,
        "wall_ns": nanos(usage.wall_time.as_ref()),
        "read_bytes": usage.read_bytes,
        "written_bytes": usage.written_bytes,
        "peak_processes": usage.peak_processes,
        "network": usage.network.as_ref().map(|network| json!({
            "connections": network.connections,
            "refused": network.refused,
            "sent_bytes": network.sent_bytes,
            "received_bytes": network.received_bytes,
            "unreachable_attempts": network.unreachable_attempts,
        })),
    })
}

fn live_usage(usage: &v1::LiveUsage) -> Value {
    json!({
        "cpu_ns": nanos(usage.cpu_time.as_ref()),
        "memory_bytes": usage.memory_bytes,
        "page_cache_bytes": usage.page_cache_bytes,
        "peak_memory_bytes": usage.peak_memory_bytes,
        "processes": usage.processes,
        "read_bytes": usage.read_bytes,
        "written_bytes": usage.written_bytes,
        "output_bytes": usage.output_bytes,
        "wall_ns": nanos(usage.wall_time.as_ref()),
    })
}

fn violation(violation: &v1::ViolationEvent) -> Value {
    json!({
        "kind": violation.kind,
        "syscall": violation.syscall,
        "number": violation.number,
        // As text: not every JSON parser keeps 64 bits.
        "args": violation.args.iter().map(|arg| format!("{arg:#x}")).collect::<Vec<_>>(),
        "count": violation.count,
        "path": non_empty(&violation.path),
    })
}

fn receipt(receipt: &v1::Receipt) -> Value {
    json!({
        "processes": receipt.processes,
        "mounts": receipt.mounts,
        "cgroups": receipt.cgroups,
        "sockets": receipt.sockets,
        "directories": receipt.directories,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logical_run_reports_no_isolation() {
        let record = run(&v1::Run { mode: v1::SandboxMode::Logical.into(), ..Default::default() });
        assert_eq!(record["isolation"], "none");
        assert_eq!(record["sandbox_mode"], "logical");
        assert_eq!(record["violations"], json!([]));
    }

    #[test]
    fn durations_and_times_are_exact() {
        let duration = prost_types::Duration { seconds: 1, nanos: 1 };
        let time = prost_types::Timestamp { seconds: 1, nanos: 250_000_001 };
        let violation = v1::ViolationEvent { args: vec![u64::MAX], ..Default::default() };
        let record = run(&v1::Run {
            setup_time: Some(duration),
            create_time: Some(time),
            output_bytes: i64::MAX,
            violations: vec![violation],
            ..Default::default()
        });
        assert_eq!(record["setup_ns"], 1_000_000_001_u64);
        assert_eq!(record["create_time"], "1970-01-01T00:00:01.250000001Z");
        assert_eq!(record["output_bytes"].to_string(), i64::MAX.to_string());
        assert_eq!(record["violations"][0]["args"][0], "0xffffffffffffffff");
    }
}
