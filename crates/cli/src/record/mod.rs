//! Sessions, runs, approvals, tenants, keys, workers and flags as JSON. The field names are a stable interface.

mod approval;
mod run;

use std::collections::{BTreeMap, BTreeSet};

use codelia_policy::{IsolationLevel, Policy};
use codelia_proto::{duration_from_proto, v1};
use codelia_types::Mode;
use serde_json::{Value, json};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

pub(crate) use self::{
    approval::{approval, approval_kind, approval_scope, approval_state},
    run::{change_kind, changed_file, changes, changes_state, run, run_process, run_state, run_with_usage},
};
use crate::units;

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

fn non_empty(text: &str) -> Option<&str> {
    Some(text).filter(|text| !text.is_empty())
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
    fn short_ids_differ() {
        let ids = ["01a1dd8f-750d-7375-8ae9-f58c8f946986", "01a1dd8f-750d-7375-9ae9-f58c8f946986"];
        assert_eq!(short_ids(ids[..1].iter().copied())(ids[0]), "01a1dd8f-750d-7375");
        assert_eq!(short_ids(ids.into_iter())(ids[1]), "01a1dd8f-750d-7375-9ae9");
        assert_eq!(short_ids(["ab"].into_iter())("ab"), "ab");
    }
}
