//! Converts rows of the store to messages of the API. Pure.

use codelia_policy::Profile;
use codelia_proto::{duration_to_proto, timestamp_to_proto, v1};
use codelia_store::{
    Approval, IsolationFloor, Key, OutputChunk, Quotas, Run, RunSummary, Session, SessionDisk,
    SpecSummary, Tenant, TenantRetention, TenantUsage, Worker,
};
use codelia_types::{
    ChangesState, CommandSpec, EndedRun, Mode, Outcome, RunResult, TransactionMode,
};
use time::OffsetDateTime;

use super::words::{Word, number_or_unspecified};

pub(crate) fn session(mut session: Session) -> v1::Session {
    if let Some(network) = session.network.take() {
        session.spec.policy.network = network;
    }
    v1::Session {
        name: format!("sessions/{}", session.id),
        session_id: session.id.to_string(),
        alias: session.alias.unwrap_or_default(),
        state: session.state.number(),
        end_reason: number_or_unspecified(session.end_reason),
        mode: v1::SandboxMode::from(session.spec.mode).into(),
        create_time: Some(timestamp_to_proto(session.created_at)),
        expire_time: Some(timestamp_to_proto(session.expires_at)),
        idle_ttl: session.idle_ttl.map(duration_to_proto),
        end_time: session.ended_at.map(timestamp_to_proto),
        worker_id: session.holder.map(String::from).unwrap_or_default(),
        lease_epoch: session.lease_epoch.0,
        labels: session.labels.into_iter().collect(),
        limits: Some((&session.spec.limits).into()),
        policy: Some((&session.spec.policy).into()),
        allow_data_loss: session.allow_data_loss,
        project: session.spec.scopes.project.unwrap_or_default(),
        profile: session.spec.profile.map(|profile| profile.name).unwrap_or_default(),
        quarantine: session.quarantine.map(|quarantine| v1::SessionQuarantine {
            reason: quarantine.reason,
            run_id: quarantine.run.map(|run| run.to_string()).unwrap_or_default(),
            create_time: Some(timestamp_to_proto(quarantine.at)),
        }),
        disk: session.disk.as_ref().map(disk),
    }
}

fn disk(disk: &SessionDisk) -> v1::SessionDisk {
    v1::SessionDisk {
        used_bytes: to_int64(disk.usage.bytes),
        used_inodes: to_int64(disk.usage.inodes),
        mechanism: disk.mechanism.to_string(),
        measure_time: Some(timestamp_to_proto(disk.measured_at)),
    }
}

fn to_int64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A profile with its policy.
pub(crate) fn profile(name: &str, profile: &Profile) -> v1::Profile {
    v1::Profile {
        name: name.to_owned(),
        description: profile.description.clone(),
        policy: Some((&profile.policy).into()),
        env: profile.env.clone().into_iter().collect(),
        limits: Some((&profile.limits).into()),
        built_in: profile.is_built_in,
    }
}

/// A session in a listing: without its policy, which may be large.
pub(crate) fn session_summary(row: Session) -> v1::Session {
    v1::Session { policy: None, ..session(row) }
}

/// Adds what only operators see.
pub(crate) fn for_operator<Spec>(run: &Run<Spec>, message: v1::Run) -> v1::Run {
    let sandbox_root = run.result().and_then(|result| result.sandbox_root.clone());
    v1::Run { sandbox_root: sandbox_root.unwrap_or_default(), ..message }
}

/// A run without the values of its environment.
pub(crate) fn run(run: &Run) -> v1::Run {
    with_command(run, command(&run.spec.command))
}

/// A run with the values of its environment, except for secret ones.
pub(crate) fn run_with_env(run: &Run) -> v1::Run {
    let env = run.spec.command.env.clone().into_iter().collect();
    with_command(run, v1::CommandSpec { env, ..command(&run.spec.command) })
}

fn with_command(run: &Run, command: v1::CommandSpec) -> v1::Run {
    let message = without_spec(run);
    let expire_time = hold_expiry(run).map(timestamp_to_proto);
    v1::Run {
        changes: message.changes.map(|changes| v1::Changes { expire_time, ..changes }),
        command: Some(command),
        mode: v1::SandboxMode::from(run.spec.mode).into(),
        network: run.spec.network.map_or(v1::NetworkMode::Unspecified, Into::into).into(),
        limits: Some((&run.spec.limits).into()),
        level: v1::IsolationLevel::from(Some(run.spec.level())).into(),
        tool: run.spec.tool.as_ref().map(|tool| tool.id.to_string()).unwrap_or_default(),
        transaction: run
            .spec
            .transaction
            .map_or(v1::TransactionMode::Unspecified, Into::into)
            .into(),
        ..message
    }
}

/// When the changes of a run are dropped that wait for a decision.
fn hold_expiry(run: &Run) -> Option<OffsetDateTime> {
    let EndedRun { ended_at, result, .. } = run.end.as_ref()?;
    match (result.changes.as_ref()?.state, run.spec.transaction) {
        (ChangesState::Held, Some(TransactionMode::Hold { timeout })) => Some(*ended_at + timeout),
        _ => None,
    }
}

/// A run in a listing.
pub(crate) fn run_summary(run: &RunSummary) -> v1::Run {
    let SpecSummary { mode, limits, argv, argv_truncated } = &run.spec;
    let command = v1::CommandSpec {
        argv: argv.clone(),
        argv_truncated: *argv_truncated,
        ..v1::CommandSpec::default()
    };
    v1::Run {
        command: Some(command),
        mode: v1::SandboxMode::from(*mode).into(),
        limits: Some(limits.into()),
        ..without_spec(run)
    }
}

fn without_spec<Spec>(run: &Run<Spec>) -> v1::Run {
    let header = v1::Run {
        name: format!("sessions/{}/runs/{}", run.session, run.id),
        run_id: run.id.to_string(),
        session_id: run.session.to_string(),
        state: run.state.number(),
        cancel_reason: run.cancel_reason.clone().unwrap_or_default(),
        waiting_for_approval: run.approval.map(|id| id.to_string()).unwrap_or_default(),
        worker_id: worker_id(run),
        create_time: Some(timestamp_to_proto(run.created_at)),
        attempt: run.attempt,
        labels: run.labels.clone().into_iter().collect(),
        ..v1::Run::default()
    };
    match &run.end {
        Some(end) => with_end(header, end),
        None => header,
    }
}

/// A run with its end.
fn with_end(run: v1::Run, end: &EndedRun) -> v1::Run {
    let EndedRun { started_at, ended_at, result } = end;
    v1::Run {
        outcome: Some(outcome(&result.outcome, &run.cancel_reason)),
        start_time: started_at.map(timestamp_to_proto),
        end_time: Some(timestamp_to_proto(*ended_at)),
        setup_time: result.setup_time.map(duration_to_proto),
        usage: result.usage.as_ref().map(Into::into),
        receipt: result.receipt.as_ref().map(Into::into),
        output_bytes: result.output_bytes,
        output_truncated: result.output_truncated,
        output_total_bytes: result.output_total,
        unenforced: result.unenforced.clone(),
        watched: result.watched.clone(),
        violations: violations(result).collect(),
        violation_count: i64::try_from(result.violations.total).unwrap_or(i64::MAX),
        changes: result.changes.as_ref().map(Into::into),
        ..run
    }
}

/// An outcome, with the reason of a cancellation.
fn outcome(outcome: &Outcome, cancel_reason: &str) -> v1::Outcome {
    match outcome {
        Outcome::Canceled => {
            let canceled = v1::Canceled { reason: cancel_reason.to_owned() };
            v1::Outcome { kind: Some(v1::outcome::Kind::Canceled(canceled)) }
        }
        other => other.into(),
    }
}

/// The policy violations of a run, in order.
pub(crate) fn violations(result: &RunResult) -> impl Iterator<Item = v1::ViolationEvent> {
    result.violations.seen.iter().map(Into::into)
}

fn worker_id<Spec>(run: &Run<Spec>) -> String {
    run.worker.as_ref().map(ToString::to_string).unwrap_or_default()
}

fn command(command: &CommandSpec) -> v1::CommandSpec {
    v1::CommandSpec {
        argv: command.argv.clone(),
        working_directory: command.working_directory.clone(),
        terminal: command.terminal.map(Into::into),
        stdin: command.stdin,
        env_names: command.env.keys().cloned().collect(),
        secret_env_names: command.secret_env_names.clone(),
        ..v1::CommandSpec::default()
    }
}

pub(crate) fn queued(subject: &Run) -> v1::QueuedEvent {
    v1::QueuedEvent { run: Some(run(subject)) }
}

/// The event that a worker has the run; `None` if the row has no worker.
pub(crate) fn assigned(run: &Run) -> Option<v1::AssignedEvent> {
    run.worker.as_ref()?;
    Some(v1::AssignedEvent {
        worker_id: worker_id(run),
        lease_epoch: run.lease_epoch.map_or(0, |epoch| epoch.0),
    })
}

/// The event that the command was started; `None` if it was not, or the run has not ended.
pub(crate) fn started(run: &Run) -> Option<v1::StartedEvent> {
    let EndedRun { started_at: Some(_), result, .. } = run.end.as_ref()? else { return None };
    Some(v1::StartedEvent {
        mode: v1::SandboxMode::from(run.spec.mode).into(),
        worker_id: worker_id(run),
        setup_time: result.setup_time.map(duration_to_proto),
        prepared: result.prepared,
        unenforced: result.unenforced.clone(),
        watched: result.watched.clone(),
    })
}

pub(crate) fn truncated(run: &Run) -> v1::OutputTruncatedEvent {
    v1::OutputTruncatedEvent {
        limit_bytes: i64::try_from(run.spec.limits.output_bytes).unwrap_or(i64::MAX),
    }
}

/// The event that the run has ended, with what an operator may see if the caller is one.
pub(crate) fn finished(subject: &Run, is_operator: bool) -> v1::FinishedEvent {
    let message = run(subject);
    v1::FinishedEvent {
        run: Some(if is_operator { for_operator(subject, message) } else { message }),
    }
}

pub(crate) fn output(chunk: OutputChunk) -> v1::OutputEvent {
    let len = i64::try_from(chunk.data.len()).unwrap_or(i64::MAX);
    v1::OutputEvent {
        stream: chunk.stream.number(),
        offset: chunk.offset,
        next_position: chunk.position.saturating_add(len),
        data: chunk.data.into(),
    }
}

pub(crate) fn tenant(tenant: &Tenant, used: Option<TenantUsage>) -> v1::Tenant {
    v1::Tenant {
        name: format!("tenants/{}", tenant.id),
        tenant_id: tenant.id.to_string(),
        create_time: Some(timestamp_to_proto(tenant.created_at)),
        quotas: Some(quotas(tenant.quotas)),
        usage: used.map(usage),
        isolation_floor: Some(floor(&tenant.floor)),
        suspend_time: tenant.suspension.as_ref().map(|(at, _)| timestamp_to_proto(*at)),
        suspend_reason: tenant
            .suspension
            .as_ref()
            .map(|(_, reason)| reason.clone())
            .unwrap_or_default(),
        delete_time: tenant.deleted_at.map(timestamp_to_proto),
        max_limits: Some((&tenant.max_limits).into()),
        retention: Some(retention(&tenant.retention)),
    }
}

fn floor(floor: &IsolationFloor) -> v1::IsolationFloor {
    let decision = floor.decision.as_ref();
    v1::IsolationFloor {
        level: v1::IsolationLevel::from(Some(floor.level)).into(),
        ask_level: v1::IsolationLevel::from(floor.ask).into(),
        reason: decision.map(|decision| decision.reason.clone()).unwrap_or_default(),
        key_id: decision
            .and_then(|decision| decision.key)
            .map(|key| key.to_string())
            .unwrap_or_default(),
        set_time: decision.map(|decision| timestamp_to_proto(decision.at)),
    }
}

fn quotas(quotas: Quotas) -> v1::Quotas {
    v1::Quotas {
        sessions: Some(quotas.sessions),
        concurrent_runs: Some(quotas.concurrent_runs),
        queued_runs: Some(quotas.queued_runs),
        requests_per_second: Some(quotas.requests_per_second),
        output_bytes: Some(quotas.output_bytes),
        disk_bytes: Some(quotas.disk_bytes),
    }
}

fn usage(used: TenantUsage) -> v1::QuotaUsage {
    v1::QuotaUsage {
        sessions: used.sessions,
        concurrent_runs: used.concurrent_runs,
        queued_runs: used.queued_runs,
        output_bytes: used.output_bytes,
        disk_bytes: used.disk_bytes,
    }
}

pub(crate) fn key(key: Key) -> v1::Key {
    v1::Key {
        name: format!("tenants/{}/keys/{}", key.tenant, key.id),
        key_id: key.id.to_string(),
        display_name: key.display_name,
        scopes: key.scopes.into_iter().map(Word::number).collect(),
        create_time: Some(timestamp_to_proto(key.created_at)),
        revoke_time: key.revoked_at.map(timestamp_to_proto),
        expire_time: key.expires_at.map(timestamp_to_proto),
        last_use_time: key.last_used_at.map(timestamp_to_proto),
    }
}

pub(crate) fn approval(approval: Approval) -> v1::Approval {
    let text = |id: Option<codelia_types::KeyId>| id.map(|id| id.to_string()).unwrap_or_default();
    v1::Approval {
        name: format!("approvals/{}", approval.id),
        approval_id: approval.id.to_string(),
        session_id: approval.session.to_string(),
        run_id: approval.run.map(|id| id.to_string()).unwrap_or_default(),
        kind: approval.kind.number(),
        host: approval.host,
        port: approval.port.into(),
        message: approval.message,
        state: approval.state.number(),
        scope: number_or_unspecified(approval.scope),
        requested_by: approval.requested_by.to_string(),
        decided_by: text(approval.decided_by),
        reason: approval.reason.unwrap_or_default(),
        create_time: Some(timestamp_to_proto(approval.created_at)),
        expire_time: Some(timestamp_to_proto(approval.expires_at)),
        decide_time: approval.decided_at.map(timestamp_to_proto),
        revoke_time: approval.revoked.map(|(at, _)| timestamp_to_proto(at)),
        revoked_by: text(approval.revoked.map(|(_, key)| key)),
        revoke_reason: approval.revoke_reason.unwrap_or_default(),
        path: approval.path,
        reach: number_or_unspecified(approval.reach),
        pid: approval.reader.pid.cast_signed(),
        exe: approval.reader.exe,
        cwd: approval.reader.cwd,
        subject: approval.subject.unwrap_or_default(),
    }
}

pub(crate) fn worker(worker: Worker) -> v1::Worker {
    v1::Worker {
        name: format!("workers/{}", worker.id),
        worker_id: worker.id.into(),
        state: worker.state.number(),
        modes: modes(worker.modes),
        watched_modes: modes(worker.watched_modes),
        slots: worker.slots,
        busy_slots: worker.busy_slots,
        sessions: worker.sessions,
        heartbeat_time: Some(timestamp_to_proto(worker.heartbeat_at)),
        version: worker.version,
        disk: worker.disk.map(|space| v1::WorkerDisk {
            free_bytes: to_int64(space.free),
            reserve_bytes: to_int64(space.reserve),
            short: space.is_short,
        }),
    }
}

fn modes(modes: Vec<Mode>) -> Vec<i32> {
    modes.into_iter().map(|mode| v1::SandboxMode::from(mode).into()).collect()
}

fn retention(retention: &TenantRetention) -> v1::Retention {
    v1::Retention {
        runs: retention.runs.map(duration_to_proto),
        output: retention.output.map(duration_to_proto),
        audit: retention.audit.map(duration_to_proto),
    }
}
