//! `codelia tenants …`, `codelia keys …`, `codelia workers …`.

use anyhow::Result;
use codelia_proto::{
    duration_to_proto, timestamp_to_proto,
    v1::{
        self, CreateKeyRequest, CreateTenantRequest, DeleteTenantRequest, DrainWorkerRequest,
        GetTenantRequest, IsolationLevel, Key, ListKeysRequest, ListTenantsRequest,
        ListWorkersRequest, ResumeTenantRequest, RevokeKeyRequest, SandboxMode,
        SetIsolationFloorRequest, SetMaxLimitsRequest, SetRetentionRequest, SuspendTenantRequest,
        Tenant, UndrainWorkerRequest, UpdateQuotasRequest, Worker, WorkerDisk,
    },
};
use time::OffsetDateTime;

use crate::{
    args,
    client::{Client, resource_name},
    commands::drain::{wait_until_empty, wait_until_working},
    ids,
    output::Output,
    resolve, units,
    words::Word,
};

/// Executes `codelia tenants`.
pub(crate) async fn tenants(client: &Client, command: args::Tenants, output: Output) -> Result<()> {
    let tenant = match command {
        args::Tenants::List => return list_tenants(client, output).await,
        args::Tenants::Create { tenant, quotas } => {
            let quotas = Some(quotas_to_proto(&quotas));
            client.call(CreateTenantRequest { tenant_id: tenant, quotas }).await?
        }
        args::Tenants::Show { tenant } => {
            client.call(GetTenantRequest { name: tenant_name(&tenant) }).await?
        }
        args::Tenants::Quota { tenant, quotas } => {
            let name = tenant_name(&tenant);
            let quotas = Some(quotas_to_proto(&quotas));
            client.call(UpdateQuotasRequest { name, quotas, update_mask: None }).await?
        }
        args::Tenants::Limits { tenant, limits } => {
            let limits = Some(limits_to_proto(&limits));
            client.call(SetMaxLimitsRequest { name: tenant_name(&tenant), limits }).await?
        }
        args::Tenants::Retention { tenant, retention } => {
            let retention = Some(retention_to_proto(&retention));
            client.call(SetRetentionRequest { name: tenant_name(&tenant), retention }).await?
        }
        args::Tenants::Floor { tenant, level, ask, reason } => {
            let request = SetIsolationFloorRequest {
                name: tenant_name(&tenant),
                level: IsolationLevel::from(Some(level)).into(),
                reason,
                ask_level: IsolationLevel::from(ask).into(),
            };
            client.call(request).await?
        }
        args::Tenants::Suspend { tenant, reason } => {
            client.call(SuspendTenantRequest { name: tenant_name(&tenant), reason }).await?
        }
        args::Tenants::Resume { tenant } => {
            client.call(ResumeTenantRequest { name: tenant_name(&tenant) }).await?
        }
        args::Tenants::Delete { tenant, force } => {
            let name = tenant_name(&tenant);
            client.call(DeleteTenantRequest { name, force, allow_missing: false }).await?
        }
    };
    output.print_message(&tenant)
}

/// Executes `codelia keys`.
pub(crate) async fn keys(client: &Client, command: args::Keys, output: Output) -> Result<()> {
    match command {
        args::Keys::List { tenant } => list_keys(client, &tenant, output).await,
        args::Keys::Create { tenant, name, scopes, expires_in } => {
            let request = CreateKeyRequest {
                parent: tenant_name(&tenant),
                display_name: name,
                scopes: scopes.iter().map(|scope| scope_to_proto(*scope).into()).collect(),
                expire_time: expires_in
                    .map(|after| timestamp_to_proto(OffsetDateTime::now_utc() + after)),
            };
            output.print_message(&client.admin().create_key(request).await?.into_inner())
        }
        args::Keys::Revoke { tenant, key } => {
            let name = resolve::key(client, &tenant_name(&tenant), &key).await?;
            output.print_message(&client.call(RevokeKeyRequest { name }).await?)
        }
    }
}

/// Executes `codelia workers`.
pub(crate) async fn workers(client: &Client, command: args::Workers, output: Output) -> Result<()> {
    let worker = match command {
        args::Workers::List => return list_workers(client, output).await,
        args::Workers::Drain { worker, wait, timeout } => {
            let drained =
                client.call(DrainWorkerRequest { name: resource_name("workers", &worker) }).await?;
            if wait { wait_until_empty(client, drained, timeout).await? } else { drained }
        }
        args::Workers::Undrain { worker, wait, timeout } => {
            let undrained = client
                .call(UndrainWorkerRequest { name: resource_name("workers", &worker) })
                .await?;
            if wait { wait_until_working(client, undrained, timeout).await? } else { undrained }
        }
    };
    output.print_message(&worker)
}

async fn list_tenants(client: &Client, output: Output) -> Result<()> {
    let tenants = client.list(ListTenantsRequest::default(), usize::MAX).await?;
    output.print_list(&["TENANT", "CREATED"], &tenants, |tenant: &Tenant| {
        vec![tenant.tenant_id.clone(), units::age(tenant.create_time.as_ref())]
    })
}

async fn list_keys(client: &Client, tenant: &str, output: Output) -> Result<()> {
    let request = ListKeysRequest { parent: tenant_name(tenant), ..Default::default() };
    let keys = client.list(request, usize::MAX).await?;
    let header = ["KEY", "NAME", "SCOPES", "CREATED", "LAST USE", "EXPIRES", "REVOKED"];
    let id = ids::short(keys.iter().map(|key| ids::last_segment(&key.name)));
    output.print_list(&header, &keys, |key: &Key| {
        vec![
            id(ids::last_segment(&key.name)),
            key.display_name.clone(),
            key.scopes().map(Word::word).collect::<Vec<_>>().join(","),
            units::age(key.create_time.as_ref()),
            units::age(key.last_use_time.as_ref()),
            units::age(key.expire_time.as_ref()),
            units::age(key.revoke_time.as_ref()),
        ]
    })
}

async fn list_workers(client: &Client, output: Output) -> Result<()> {
    let workers = client.list(ListWorkersRequest::default(), usize::MAX).await?;
    let header =
        ["WORKER", "STATE", "MODES", "BUSY", "SESSIONS", "DISK FREE", "HEARTBEAT", "VERSION"];
    output.print_list(&header, &workers, |worker: &Worker| {
        vec![
            worker.worker_id.clone(),
            worker.state().word(),
            modes(worker),
            format!("{}/{}", worker.busy_slots, worker.slots),
            worker.sessions.to_string(),
            disk_free(worker),
            units::age(worker.heartbeat_time.as_ref()),
            worker.version.clone(),
        ]
    })
}

/// The free space of a worker. A `!` marks less than its reserve.
fn disk_free(worker: &Worker) -> String {
    let space = worker.disk.as_ref();
    let shown = |disk: &WorkerDisk| {
        let free = units::bytes(u64::try_from(disk.free_bytes).unwrap_or_default());
        format!("{free}{}", if disk.short { "!" } else { "" })
    };
    space.map(shown).unwrap_or_default()
}

/// The modes of a worker. A `~` marks those in which it only watches limits.
fn modes(worker: &Worker) -> String {
    let is_watched = |mode| worker.watched_modes().any(|watched| watched == mode);
    let marked =
        |mode: SandboxMode| format!("{}{}", mode.word(), if is_watched(mode) { "~" } else { "" });
    worker.modes().map(marked).collect::<Vec<_>>().join(",")
}

fn tenant_name(tenant: &str) -> String {
    resource_name("tenants", tenant)
}

fn quotas_to_proto(quotas: &args::Quotas) -> v1::Quotas {
    v1::Quotas {
        sessions: quotas.sessions,
        concurrent_runs: quotas.concurrent_runs,
        queued_runs: quotas.queued_runs,
        requests_per_second: quotas.requests_per_second,
        output_bytes: quotas.output_bytes,
        disk_bytes: quotas.disk_bytes,
    }
}

fn limits_to_proto(limits: &args::MaxLimits) -> v1::Limits {
    v1::Limits {
        timeout: limits.timeout.map(duration_to_proto),
        memory_bytes: limits.memory_bytes,
        cpu_millicores: limits.cpu_millicores,
        pids: limits.pids,
        open_files: limits.open_files,
        output_bytes: limits.output_bytes,
        cpu_time: limits.cpu_time.map(duration_to_proto),
        file_bytes: limits.file_bytes,
        tmp_bytes: limits.tmp_bytes,
        disk_bytes: limits.disk_bytes,
        inodes: limits.inodes,
    }
}

fn retention_to_proto(retention: &args::RetentionTimes) -> v1::Retention {
    v1::Retention {
        runs: retention.runs.map(duration_to_proto),
        output: retention.output.map(duration_to_proto),
        audit: retention.audit.map(duration_to_proto),
    }
}

fn scope_to_proto(scope: args::Scope) -> v1::Scope {
    match scope {
        args::Scope::Run => v1::Scope::Run,
        args::Scope::Files => v1::Scope::Files,
        args::Scope::Approve => v1::Scope::Approve,
        args::Scope::Audit => v1::Scope::Audit,
        args::Scope::Admin => v1::Scope::Admin,
        args::Scope::Operator => v1::Scope::Operator,
    }
}
