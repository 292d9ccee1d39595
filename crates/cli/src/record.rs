//! Sessions, runs, approvals, tenants, keys, workers and flags as JSON. The field names are a stable interface.

use std::collections::{BTreeMap, BTreeSet};

use codelia_policy::{IsolationLevel, Policy};
use codelia_proto::{duration_from_proto, v1};
use codelia_types::{Mode, NetworkMode};
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{exit_status, units};

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

/// A session.
pub(crate) fn session(session: &v1::Session) -> Value {
    json!({
        "session_id": session.session_id,
        "alias": non_empty(&session.alias),
        "state": session_state(session),
        "end_reason": match session.end_reason() {
            v1::SessionEndReason::Unspecified => None,
            v1::SessionEndReason::Closed => Some("closed"),
            v1::SessionEndReason::Expired => Some("expired"),
            v1::SessionEndReason::Idle => Some("idle"),
            v1::SessionEndReason::DataLost => Some("data_lost"),
        },
        "sandbox_mode": mode(session.mode()),
        "create_time": timestamp(session.create_time.as_ref()),
        "expire_time": timestamp(session.expire_time.as_ref()),
        "end_time": timestamp(session.end_time.as_ref()),
        "idle_ttl_ns": nanos(session.idle_ttl.as_ref()),
        "allow_data_loss": session.allow_data_loss,
        "project": non_empty(&session.project),
        "profile": non_empty(&session.profile),
        "quarantine": session.quarantine.as_ref().map(|quarantine| json!({
            "reason": quarantine.reason,
            "run_id": non_empty(&quarantine.run_id),
            "create_time": timestamp(quarantine.create_time.as_ref()),
        })),
        "worker_id": non_empty(&session.worker_id),
        "lease_epoch": session.lease_epoch,
        "disk": session.disk.as_ref().map(|disk| json!({
            "used_bytes": disk.used_bytes,
            "used_inodes": disk.used_inodes,
            "mechanism": disk.mechanism,
            "measure_time": timestamp(disk.measure_time.as_ref()),
        })),
        "limits": session.limits.as_ref().map(limits),
        "labels": session.labels,
    })
}

/// An approval.
pub(crate) fn approval(approval: &v1::Approval) -> Value {
    json!({
        "approval_id": approval.approval_id,
        "session_id": approval.session_id,
        "run_id": non_empty(&approval.run_id),
        "kind": approval_kind(approval),
        "host": non_empty(&approval.host),
        "port": Some(approval.port).filter(|port| *port != 0),
        "path": non_empty(&approval.path),
        "pid": Some(approval.pid).filter(|pid| *pid != 0),
        "exe": non_empty(&approval.exe),
        "cwd": non_empty(&approval.cwd),
        "reach": approval_reach(approval),
        "message": approval.message,
        "state": approval_state(approval),
        "scope": approval_scope(approval),
        "subject": non_empty(&approval.subject),
        "requested_by": approval.requested_by,
        "decided_by": non_empty(&approval.decided_by),
        "reason": non_empty(&approval.reason),
        "create_time": timestamp(approval.create_time.as_ref()),
        "expire_time": timestamp(approval.expire_time.as_ref()),
        "decide_time": timestamp(approval.decide_time.as_ref()),
        "revoke_time": timestamp(approval.revoke_time.as_ref()),
        "revoked_by": non_empty(&approval.revoked_by),
        "revoke_reason": non_empty(&approval.revoke_reason),
    })
}

pub(crate) fn audit_event(event: &v1::AuditEvent) -> Value {
    json!({
        "event_id": event.event_id,
        "writer_id": event.writer_id,
        "create_time": timestamp(event.create_time.as_ref()),
        "kind": event.kind,
        "tenant_id": non_empty(&event.tenant_id),
        "session_id": non_empty(&event.session_id),
        "run_id": non_empty(&event.run_id),
        "key_id": non_empty(&event.key_id),
        "worker_id": non_empty(&event.worker_id),
        "field": non_empty(&event.field),
        // As it was signed, unless it is not JSON.
        "detail": serde_json::from_str::<Value>(&event.detail).unwrap_or_else(|_| json!(event.detail)),
    })
}

/// Name of what an approval is about.
pub(crate) fn approval_kind(approval: &v1::Approval) -> &'static str {
    match approval.kind() {
        v1::ApprovalKind::Unspecified => "unknown",
        v1::ApprovalKind::NetworkProxy => "network_proxy",
        v1::ApprovalKind::NetworkHost => "network_host",
        v1::ApprovalKind::EgressHost => "egress_host",
        v1::ApprovalKind::Isolation => "isolation",
        v1::ApprovalKind::FileRead => "file_read",
    }
}

/// Name of an approval's state.
pub(crate) fn approval_state(approval: &v1::Approval) -> &'static str {
    match approval.state() {
        v1::ApprovalState::Unspecified => "unknown",
        v1::ApprovalState::Pending => "pending",
        v1::ApprovalState::Allowed => "allowed",
        v1::ApprovalState::Denied => "denied",
        v1::ApprovalState::Expired => "expired",
    }
}

/// Name of the files that an approval is decided for; `None` unless it is about one and decided.
pub(crate) fn approval_reach(approval: &v1::Approval) -> Option<&'static str> {
    match approval.reach() {
        v1::ApprovalReach::Unspecified => None,
        v1::ApprovalReach::File => Some("file"),
        v1::ApprovalReach::Directory => Some("directory"),
    }
}

/// Name of what an approval holds for; `None` unless it is allowed.
pub(crate) fn approval_scope(approval: &v1::Approval) -> Option<&'static str> {
    match approval.scope() {
        v1::ApprovalScope::Unspecified => None,
        v1::ApprovalScope::Once => Some("once"),
        v1::ApprovalScope::Session => Some("session"),
        v1::ApprovalScope::User => Some("user"),
        v1::ApprovalScope::Project => Some("project"),
        v1::ApprovalScope::Tenant => Some("tenant"),
    }
}

/// A tenant.
pub(crate) fn tenant(tenant: &v1::Tenant) -> Value {
    json!({
        "tenant_id": tenant.tenant_id,
        "create_time": timestamp(tenant.create_time.as_ref()),
        "isolation_floor": tenant.isolation_floor.as_ref().map(|floor| json!({
            "level": floor.level().to_level(),
            "ask_level": floor.ask_level().to_level(),
            "reason": floor.reason,
            "key_id": floor.key_id,
            "set_time": timestamp(floor.set_time.as_ref()),
        })),
        "suspend_time": timestamp(tenant.suspend_time.as_ref()),
        "suspend_reason": non_empty(&tenant.suspend_reason),
        "delete_time": timestamp(tenant.delete_time.as_ref()),
        "max_limits": tenant.max_limits.as_ref().map(limits),
        "retention": tenant.retention.as_ref().map(|retention| json!({
            "runs_ns": nanos(retention.runs.as_ref()),
            "output_ns": nanos(retention.output.as_ref()),
            "events_ns": nanos(retention.events.as_ref()),
            "audit_ns": nanos(retention.audit.as_ref()),
        })),
        "quotas": tenant.quotas.as_ref().map(|quotas| json!({
            "sessions": quotas.sessions,
            "concurrent_runs": quotas.concurrent_runs,
            "queued_runs": quotas.queued_runs,
            "requests_per_second": quotas.requests_per_second,
            "output_bytes": quotas.output_bytes,
            "disk_bytes": quotas.disk_bytes,
        })),
        "usage": tenant.usage.as_ref().map(|usage| json!({
            "sessions": usage.sessions,
            "concurrent_runs": usage.concurrent_runs,
            "queued_runs": usage.queued_runs,
            "output_bytes": usage.output_bytes,
            "disk_bytes": usage.disk_bytes,
        })),
    })
}

/// A key, without its secret.
pub(crate) fn key(key: &v1::Key) -> Value {
    json!({
        "key_id": last_segment(&key.name),
        "name": key.name,
        "display_name": non_empty(&key.display_name),
        "scopes": key.scopes().map(scope).collect::<Vec<_>>(),
        "create_time": timestamp(key.create_time.as_ref()),
        "revoke_time": timestamp(key.revoke_time.as_ref()),
        "expire_time": timestamp(key.expire_time.as_ref()),
        "last_use_time": timestamp(key.last_use_time.as_ref()),
    })
}

/// The caller's key and tenant.
pub(crate) fn identity(tenant: &v1::Tenant, key: &v1::Key) -> Value {
    let tenant = self::tenant(tenant);
    json!({
        "tenant_id": tenant["tenant_id"],
        "key_id": last_segment(&key.name),
        "key_name": non_empty(&key.display_name),
        "scopes": key.scopes().map(scope).collect::<Vec<_>>(),
        "key_expire_time": timestamp(key.expire_time.as_ref()),
        "isolation_floor": tenant["isolation_floor"]["level"],
        "isolation_ask_floor": tenant["isolation_floor"]["ask_level"],
        "quotas": tenant["quotas"],
        "usage": tenant["usage"],
    })
}

/// What a server offers.
pub(crate) fn server_info(info: &v1::ServerInfo) -> Value {
    json!({
        "version": info.version,
        "modes": info.modes().filter_map(mode).collect::<Vec<_>>(),
        "default_mode": mode(info.default_mode()),
        "default_limits": info.default_limits.as_ref().map(limits),
        "max_limits": info.max_limits.as_ref().map(limits),
        "default_session_ttl_ns": nanos(info.default_session_ttl.as_ref()),
        "max_session_ttl_ns": nanos(info.max_session_ttl.as_ref()),
        "features": info.features,
    })
}

/// A worker.
pub(crate) fn worker(worker: &v1::Worker) -> Value {
    json!({
        "worker_id": worker.worker_id,
        "state": worker_state(worker),
        "modes": worker.modes().map(mode).collect::<Vec<_>>(),
        "watched_modes": worker.watched_modes().map(mode).collect::<Vec<_>>(),
        "slots": worker.slots,
        "busy_slots": worker.busy_slots,
        "sessions": worker.sessions,
        "heartbeat_time": timestamp(worker.heartbeat_time.as_ref()),
        "version": worker.version,
        "disk": worker.disk.as_ref().map(|disk| json!({
            "free_bytes": disk.free_bytes,
            "reserve_bytes": disk.reserve_bytes,
            "short": disk.short,
        })),
    })
}

pub(crate) fn flag(flag: &v1::Flag) -> Value {
    let numbers = flag.numbers.unwrap_or_default();
    json!({
        "flag_id": flag.flag_id,
        "revision": flag.revision,
        "action": flag_action(flag),
        "rule": flag.rule.as_ref().map(flag_rule),
        "origin_revision": flag.origin_revision,
        "reason": flag.reason,
        "key_id": Some(&flag.key_id).filter(|key| !key.is_empty()),
        "create_time": timestamp(flag.create_time.as_ref()),
        "numbers": {
            "sessions": numbers.sessions,
            "refused_sessions": numbers.refused_sessions,
            "runs": numbers.runs,
            "refused_runs": numbers.refused_runs,
            "failed_runs": numbers.failed_runs,
            "setup_p95_ms": millis(numbers.setup_p95.as_ref()),
        },
    })
}

/// A tool.
pub(crate) fn tool(tool: &v1::Tool) -> Value {
    let declaration = tool.declaration.clone().unwrap_or_default();
    let policy = declaration.policy.and_then(|policy| Policy::try_from(policy).ok());
    json!({
        "tool_id": tool.tool_id,
        "name": tool.name,
        "version": tool.version,
        "level": tool.level().to_level().map(IsolationLevel::as_str),
        "owner": declaration.owner,
        "executables": declaration.executables,
        "command_pattern": declaration.command_pattern,
        "policy": policy,
        "transactional": declaration.transactional,
        "key_id": tool.key_id,
        "create_time": timestamp(tool.create_time.as_ref()),
        "update_time": timestamp(tool.update_time.as_ref()),
        "approval": tool.approval.as_ref().map(|approval| json!({
            "level": approval.level().to_level().map(IsolationLevel::as_str),
            "reason": approval.reason,
            "key_id": approval.key_id,
            "create_time": timestamp(approval.create_time.as_ref()),
        })),
        "quarantine": tool.quarantine.as_ref().map(|quarantine| json!({
            "reason": quarantine.reason,
            "key_id": non_empty(&quarantine.key_id),
            "run_id": non_empty(&quarantine.run_id),
            "create_time": timestamp(quarantine.create_time.as_ref()),
        })),
    })
}

/// The fields of a volume.
pub(crate) fn volume(volume: &v1::Volume) -> Value {
    json!({
        "volume_id": volume.volume_id,
        "name": volume.name,
        "project": non_empty(&volume.project),
        "max_bytes": volume.max_bytes,
        "used_bytes": volume.used_bytes,
        "ttl_ns": nanos(volume.ttl.as_ref()),
        "sessions": volume.sessions,
        "key_id": volume.key_id,
        "create_time": timestamp(volume.create_time.as_ref()),
        "use_time": timestamp(volume.use_time.as_ref()),
    })
}

fn flag_rule(rule: &v1::FlagRule) -> Value {
    let labels: BTreeMap<_, _> = rule.labels.iter().collect();
    json!({
        "tenant": Some(&rule.tenant).filter(|tenant| !tenant.is_empty()),
        "labels": labels,
        "percent": rule.percent,
        "mode": mode(rule.mode()),
        "floor": rule.floor().to_level().map(|level| level.to_string()),
        "guard": rule.guard.as_ref().map(|guard| json!({
            "max_refused_percent": guard.max_refused_percent,
            "max_failed_percent": guard.max_failed_percent,
            "max_setup_p95_ms": millis(guard.max_setup_p95.as_ref()),
            "min_count": guard.min_count,
        })),
    })
}

/// How a revision of a flag came about.
pub(crate) fn flag_action(flag: &v1::Flag) -> &'static str {
    match flag.action() {
        v1::FlagAction::Unspecified => "unknown",
        v1::FlagAction::Set => "set",
        v1::FlagAction::Rollback => "rollback",
        v1::FlagAction::Guard => "guard",
    }
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

/// Name of a session's state.
pub(crate) fn session_state(session: &v1::Session) -> &'static str {
    match session.state() {
        v1::SessionState::Unspecified => "unknown",
        v1::SessionState::Open if session.quarantine.is_some() => "quarantined",
        v1::SessionState::Open => "open",
        v1::SessionState::Ended => "ended",
    }
}

/// Name of a worker's state.
pub(crate) fn worker_state(worker: &v1::Worker) -> &'static str {
    match worker.state() {
        v1::WorkerState::Unspecified => "unknown",
        v1::WorkerState::Ready => "ready",
        v1::WorkerState::Draining => "draining",
        v1::WorkerState::Gone => "gone",
    }
}

/// Name of a scope.
pub(crate) fn scope(scope: v1::Scope) -> &'static str {
    match scope {
        v1::Scope::Unspecified => "unknown",
        v1::Scope::Run => "run",
        v1::Scope::Files => "files",
        v1::Scope::Approve => "approve",
        v1::Scope::Audit => "audit",
        v1::Scope::Admin => "admin",
        v1::Scope::Operator => "operator",
    }
}

/// Name of a mode; `None` if it is unspecified.
pub(crate) fn mode(mode: v1::SandboxMode) -> Option<&'static str> {
    mode.to_mode().map(Mode::as_str)
}

/// Formats a time as RFC 3339, with all fractions of the second that the server sent.
pub(crate) fn timestamp(time: Option<&prost_types::Timestamp>) -> Option<String> {
    let time = time?;
    let nanos = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
    OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()?.format(&Rfc3339).ok()
}

/// Formats a time as the distance from now, such as `5m ago` or `in 2h`, for tables.
pub(crate) fn relative(time: Option<&prost_types::Timestamp>) -> String {
    time.map_or_else(String::new, |time| {
        units::relative(OffsetDateTime::now_utc().unix_timestamp().saturating_sub(time.seconds))
    })
}

/// Lengths of ids in tables: time and counter, some random digits more, all.
const ID_LENGTHS: [usize; 3] = [18, 23, 36];

/// Returns the ids as tables show them: shortened, but so that all of them differ.
pub(crate) fn short_ids<'a>(ids: impl Iterator<Item = &'a str>) -> impl Fn(&str) -> String {
    let ids: BTreeSet<&str> = ids.collect();
    let cut = |id: &str, length: usize| id.get(..length).unwrap_or(id).to_owned();
    let differ =
        |length: &usize| ids.iter().map(|id| cut(id, *length)).collect::<BTreeSet<_>>().len() == ids.len();
    let length = ID_LENGTHS.into_iter().find(differ).unwrap_or(usize::MAX);
    move |id| cut(id, length)
}

/// Converts a duration to whole nanoseconds.
fn nanos(duration: Option<&prost_types::Duration>) -> Option<u64> {
    let duration = duration_from_proto(duration?).ok()?;
    u64::try_from(duration.as_nanos()).ok()
}

/// Converts a duration to milliseconds, for people.
pub(crate) fn millis(duration: Option<&prost_types::Duration>) -> Option<f64> {
    duration.and_then(|wire| duration_from_proto(wire).ok()).map(|duration| duration.as_secs_f64() * 1000.0)
}

/// Returns the id at the end of a resource name.
pub(crate) fn last_segment(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Mode `logical` provides no isolation.
fn isolation(mode: v1::SandboxMode) -> Option<&'static str> {
    mode.to_mode().map(|mode| if mode == Mode::Logical { "none" } else { mode.as_str() })
}

fn non_empty(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
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

/// Limits of a run or session.
pub(crate) fn limits(limits: &v1::Limits) -> Value {
    json!({
        "timeout_ns": nanos(limits.timeout.as_ref()),
        "memory_bytes": limits.memory_bytes,
        "cpu_millicores": limits.cpu_millicores,
        "pids": limits.pids,
        "open_files": limits.open_files,
        "output_bytes": limits.output_bytes,
        "cpu_time_ns": nanos(limits.cpu_time.as_ref()),
        "file_bytes": limits.file_bytes,
        "tmp_bytes": limits.tmp_bytes,
        "disk_bytes": limits.disk_bytes,
        "inodes": limits.inodes,
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
    fn short_ids_differ() {
        let ids = ["01a1dd8f-750d-7375-8ae9-f58c8f946986", "01a1dd8f-750d-7375-9ae9-f58c8f946986"];
        assert_eq!(short_ids(ids[..1].iter().copied())(ids[0]), "01a1dd8f-750d-7375");
        assert_eq!(short_ids(ids.into_iter())(ids[1]), "01a1dd8f-750d-7375-9ae9");
        assert_eq!(short_ids(["ab"].into_iter())("ab"), "ab");
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
