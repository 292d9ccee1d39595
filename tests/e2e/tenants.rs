//! Tenant isolation on every method of every service. A method that is missing in the table fails
//! the test, so that a new one cannot be forgotten.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use codelia_proto::v1::*;
use codelia_tests::{
    Client, Cluster, HeldRun, Method, all_methods, call, reflected_methods, refusal, shell,
};
use prost::Message;
use tonic::Code;
use tonic_types::StatusExt;
use uuid::Uuid;

/// Ids that a caller may try: of another tenant's resources, or of none.
struct Ids {
    session: String,
    alias: String,
    run: String,
    tenant: String,
    key: String,
    approval: String,
}

/// The expected answer to ids that are not the caller's.
enum Expected {
    /// `NOT_FOUND` for each request, with the same message as for ids that do not exist.
    NotFound(Vec<Vec<u8>>),
    /// The request has no ids; the answer must not contain the other tenant's.
    Unmentioned(Vec<u8>),
    /// Only for operators: the request is refused.
    Denied(Vec<u8>),
}

fn not_found(requests: impl IntoIterator<Item = impl Message>) -> Expected {
    Expected::NotFound(requests.into_iter().map(|request| request.encode_to_vec()).collect())
}

/// The table of every method with its expected answer.
fn expected(method: &str, ids: &Ids) -> Option<Expected> {
    let sessions = || [ids.session.clone(), ids.alias.clone()];
    let runs = || {
        [
            ids.run.clone(),
            format!("sessions/-/runs/{}", ids.run.rsplit('/').next().unwrap_or_default()),
        ]
    };
    let hour = || Some(prost_types::Duration { seconds: 3600, nanos: 0 });
    let exec = |kind| ExecRequest { kind: Some(kind) };
    Some(match method {
        "codelia.v1.SessionService.CreateSession" => {
            Expected::Unmentioned(CreateSessionRequest::default().encode_to_vec())
        }
        "codelia.v1.SessionService.ListSessions" => {
            Expected::Unmentioned(ListSessionsRequest::default().encode_to_vec())
        }
        "codelia.v1.SessionService.GetSession" => {
            not_found(sessions().map(|name| GetSessionRequest { name }))
        }
        "codelia.v1.SessionService.ExtendSession" => {
            not_found(sessions().map(|name| ExtendSessionRequest { name, ttl: hour() }))
        }
        "codelia.v1.SessionService.UpdateSession" => {
            let update_mask = Some(prost_types::FieldMask { paths: vec!["ttl".into()] });
            let request = UpdateSessionRequest { update_mask, ttl: hour(), ..Default::default() };
            not_found(sessions().map(|name| UpdateSessionRequest { name, ..request.clone() }))
        }
        "codelia.v1.SessionService.ReleaseSession" => {
            not_found(sessions().map(|name| ReleaseSessionRequest { name, reason: "mine".into() }))
        }
        "codelia.v1.SessionService.CloseSession" => {
            not_found(sessions().map(|name| CloseSessionRequest { name }))
        }
        "codelia.v1.RunService.StartRun" => not_found(sessions().map(|name| shell(&name, "true"))),
        "codelia.v1.RunService.WatchRun" => not_found(runs().map(|name| WatchRunRequest {
            name,
            position: 0,
            ..Default::default()
        })),
        "codelia.v1.RunService.Exec" => {
            let starts =
                sessions().map(|name| exec(exec_request::Kind::Start(shell(&name, "true"))));
            let attaches = runs().map(|name| {
                exec(exec_request::Kind::Attach(WatchRunRequest {
                    name,
                    position: 0,
                    ..Default::default()
                }))
            });
            not_found(starts.into_iter().chain(attaches))
        }
        "codelia.v1.RunService.GetRun" => not_found(runs().map(|name| GetRunRequest {
            name,
            include_usage: true,
            ..Default::default()
        })),
        "codelia.v1.RunService.ListRuns" => {
            not_found(sessions().map(|parent| ListRunsRequest { parent, ..Default::default() }))
        }
        "codelia.v1.RunService.CancelRun" => {
            not_found(runs().map(|name| CancelRunRequest { name, ..Default::default() }))
        }
        "codelia.v1.RunService.SignalRun" => {
            not_found(runs().map(|name| SignalRunRequest { name, signal: 15 }))
        }
        "codelia.v1.RunService.ApplyChanges" => {
            not_found(runs().map(|name| ApplyChangesRequest { name }))
        }
        "codelia.v1.RunService.DiscardChanges" => {
            not_found(runs().map(|name| DiscardChangesRequest { name }))
        }
        "codelia.v1.PolicyService.CheckPolicy" => {
            let policy = Some(Policy::default());
            Expected::Unmentioned(CheckPolicyRequest { policy, mode: 0 }.encode_to_vec())
        }
        "codelia.v1.PolicyService.ExplainPolicy" => not_found(
            sessions().map(|session| ExplainPolicyRequest { session, ..Default::default() }),
        ),
        "codelia.v1.InfoService.GetServerInfo" | "codelia.v1.InfoService.WhoAmI" => {
            Expected::Unmentioned(Vec::new())
        }
        _ => {
            return of_files(method, ids)
                .or_else(|| of_scope_policies(method, ids))
                .or_else(|| of_admin(method, ids))
                .or_else(|| of_approvals(method, ids))
                .or_else(|| of_tools(method, ids))
                .or_else(|| of_volumes(method));
        }
    })
}

/// The table for the policies of scopes.
fn of_scope_policies(method: &str, ids: &Ids) -> Option<Expected> {
    let scope = PolicyScope::Organisation.into();
    Some(match method {
        "codelia.v1.PolicyService.SetScopePolicy" => not_found([SetScopePolicyRequest {
            scope,
            name: ids.tenant.clone(),
            policy: Some(Policy::default()),
            reason: "mine".into(),
            expected_version: None,
        }]),
        "codelia.v1.PolicyService.GetScopePolicy" => {
            not_found([GetScopePolicyRequest { scope, name: ids.tenant.clone(), version: 0 }])
        }
        "codelia.v1.PolicyService.DeleteScopePolicy" => {
            let (name, reason) = (ids.tenant.clone(), "mine".into());
            not_found([DeleteScopePolicyRequest { scope, name, reason, expected_version: None }])
        }
        "codelia.v1.PolicyService.RollbackScopePolicy" => {
            let (name, reason) = (ids.tenant.clone(), "mine".into());
            not_found([RollbackScopePolicyRequest { scope, name, version: 1, reason }])
        }
        "codelia.v1.PolicyService.ListScopePolicyVersions" => {
            let name = ids.tenant.clone();
            not_found([ListScopePolicyVersionsRequest { scope, name, ..Default::default() }])
        }
        "codelia.v1.PolicyService.ListProfiles" => {
            Expected::Unmentioned(ListProfilesRequest {}.encode_to_vec())
        }
        "codelia.v1.PolicyService.GetProfile" => {
            Expected::Unmentioned(GetProfileRequest { name: "cargo".to_owned() }.encode_to_vec())
        }
        "codelia.v1.PolicyService.ListProjects" => {
            Expected::Unmentioned(ListProjectsRequest::default().encode_to_vec())
        }
        "codelia.v1.PolicyService.DryRunScopePolicy" => {
            let (name, policy) = (ids.tenant.clone(), Some(Policy::default()));
            not_found([DryRunScopePolicyRequest { scope, name, policy, ..Default::default() }])
        }
        _ => return None,
    })
}

/// The table for the admin service.
fn of_admin(method: &str, ids: &Ids) -> Option<Expected> {
    Some(match method {
        "codelia.v1.AdminService.GetTenant" => {
            not_found([GetTenantRequest { name: ids.tenant.clone() }])
        }
        "codelia.v1.AdminService.ListTenants" => {
            Expected::Unmentioned(ListTenantsRequest::default().encode_to_vec())
        }
        "codelia.v1.AdminService.CreateKey" => not_found([CreateKeyRequest {
            parent: ids.tenant.clone(),
            scopes: vec![Scope::Run.into()],
            ..Default::default()
        }]),
        "codelia.v1.AdminService.ListKeys" => {
            not_found([ListKeysRequest { parent: ids.tenant.clone(), ..Default::default() }])
        }
        "codelia.v1.AdminService.RevokeKey" => {
            let own = ids
                .key
                .rsplit('/')
                .next()
                .map(|id| format!("tenants/-/keys/{id}"))
                .unwrap_or_default();
            not_found([ids.key.clone(), own].map(|name| RevokeKeyRequest { name }))
        }
        _ => return None,
    })
}

/// The table for the tool service: the other tenant has a tool `theirs`.
fn of_tools(method: &str, ids: &Ids) -> Option<Expected> {
    let name = format!("{}/tools/theirs", ids.tenant);
    let names = || [name.clone(), "tools/theirs".to_owned()];
    let reason = || "mine".to_owned();
    Some(match method {
        "codelia.v1.ToolService.RegisterTool" => {
            let declaration = ToolDeclaration {
                owner: "me".into(),
                executables: vec!["sh".into()],
                ..Default::default()
            };
            let declaration = Some(declaration);
            not_found([RegisterToolRequest { name, declaration, expected_version: None }])
        }
        "codelia.v1.ToolService.GetTool" => not_found(names().map(|name| GetToolRequest { name })),
        "codelia.v1.ToolService.DeleteTool" => {
            not_found(names().map(|name| DeleteToolRequest { name }))
        }
        "codelia.v1.ToolService.ListTools" => {
            not_found([ListToolsRequest { parent: ids.tenant.clone(), ..Default::default() }])
        }
        "codelia.v1.ToolService.QuarantineTool" => {
            not_found(names().map(|name| QuarantineToolRequest { name, reason: reason() }))
        }
        "codelia.v1.ToolService.ReleaseTool" => {
            not_found(names().map(|name| ReleaseToolRequest { name, reason: reason() }))
        }
        _ => return None,
    })
}

/// The table for the volume service: the other tenant has a volume `theirs`.
fn of_volumes(method: &str) -> Option<Expected> {
    let name = || "volumes/theirs".to_owned();
    Some(match method {
        "codelia.v1.VolumeService.CreateVolume" => {
            let request = CreateVolumeRequest { volume_id: "mine".into(), ..Default::default() };
            Expected::Unmentioned(request.encode_to_vec())
        }
        "codelia.v1.VolumeService.GetVolume" => not_found([GetVolumeRequest { name: name() }]),
        "codelia.v1.VolumeService.DeleteVolume" => {
            not_found([DeleteVolumeRequest { name: name() }])
        }
        "codelia.v1.VolumeService.ListVolumes" => {
            Expected::Unmentioned(ListVolumesRequest::default().encode_to_vec())
        }
        _ => return None,
    })
}

/// The table for the approval service, and for operators.
fn of_approvals(method: &str, ids: &Ids) -> Option<Expected> {
    let sessions = || [ids.session.clone(), ids.alias.clone()];
    let name = || ids.approval.clone();
    Some(match method {
        "codelia.v1.ApprovalService.ListApprovals" => not_found(
            sessions().map(|parent| ListApprovalsRequest { parent, ..Default::default() }),
        ),
        "codelia.v1.AuditService.ListEvents" => {
            not_found(sessions().map(|parent| ListEventsRequest { parent, ..Default::default() }))
        }
        "codelia.v1.ApprovalService.WatchApprovals" => {
            not_found(sessions().map(|parent| WatchApprovalsRequest { parent }))
        }
        "codelia.v1.ApprovalService.GetApproval" => {
            not_found([GetApprovalRequest { name: name() }])
        }
        "codelia.v1.ApprovalService.DecideApproval" => {
            let decision = ApprovalDecision::Allow.into();
            not_found([DecideApprovalRequest { name: name(), decision, ..Default::default() }])
        }
        "codelia.v1.ApprovalService.RevokeApproval" => {
            not_found([RevokeApprovalRequest { name: name(), ..Default::default() }])
        }
        _ => return for_operators(method, ids).map(Expected::Denied),
    })
}

/// The table for the file service.
fn of_files(method: &str, ids: &Ids) -> Option<Expected> {
    let sessions = || [ids.session.clone(), ids.alias.clone()];
    let path = || "secret".to_owned();
    Some(match method {
        "codelia.v1.FileService.WriteFile" => not_found(sessions().map(|parent| {
            let open = WriteFileOpen { parent, path: path(), ..Default::default() };
            WriteFileRequest { kind: Some(write_file_request::Kind::Open(open)) }
        })),
        "codelia.v1.FileService.ReadFile" => not_found(sessions().map(|parent| ReadFileRequest {
            parent,
            path: path(),
            ..Default::default()
        })),
        "codelia.v1.FileService.StatFile" => not_found(sessions().map(|parent| StatFileRequest {
            parent,
            path: path(),
            ..Default::default()
        })),
        "codelia.v1.FileService.ListFiles" => {
            not_found(sessions().map(|parent| ListFilesRequest { parent, ..Default::default() }))
        }
        "codelia.v1.FileService.MakeDirectory" => {
            not_found(sessions().map(|parent| MakeDirectoryRequest {
                parent,
                path: path(),
                ..Default::default()
            }))
        }
        "codelia.v1.FileService.MoveFile" => not_found(sessions().map(|parent| MoveFileRequest {
            parent,
            source_path: path(),
            destination_path: "taken".into(),
            overwrite: true,
        })),
        "codelia.v1.FileService.CopyFile" => not_found(sessions().map(|parent| CopyFileRequest {
            parent,
            source_path: path(),
            destination_path: "taken".into(),
            overwrite: true,
        })),
        "codelia.v1.FileService.RemoveFile" => {
            not_found(sessions().map(|parent| RemoveFileRequest {
                parent,
                path: path(),
                recursive: true,
            }))
        }
        "codelia.v1.FileService.ExportFiles" => {
            not_found(sessions().map(|parent| ExportFilesRequest { parent, ..Default::default() }))
        }
        "codelia.v1.FileService.WatchFiles" => {
            not_found(sessions().map(|parent| WatchFilesRequest { parent, ..Default::default() }))
        }
        "codelia.v1.FileService.ImportFiles" => not_found(sessions().map(|parent| {
            let open = ImportFilesOpen { parent, ..Default::default() };
            ImportFilesRequest { kind: Some(import_files_request::Kind::Open(open)) }
        })),
        "codelia.v1.FileService.EditFile" => not_found(sessions().map(|parent| EditFileRequest {
            parent,
            path: path(),
            old_text: "a".into(),
            new_text: "b".into(),
            ..Default::default()
        })),
        _ => return None,
    })
}

/// Requests for operators only.
fn for_operators(method: &str, ids: &Ids) -> Option<Vec<u8>> {
    Some(match method {
        "codelia.v1.AdminService.CreateTenant" => {
            CreateTenantRequest { tenant_id: "new".into(), quotas: None }.encode_to_vec()
        }
        "codelia.v1.AdminService.UpdateQuotas" => {
            let quotas = Some(Quotas { sessions: Some(1), ..Default::default() });
            UpdateQuotasRequest { name: ids.tenant.clone(), quotas, update_mask: None }
                .encode_to_vec()
        }
        "codelia.v1.AdminService.SetIsolationFloor" => SetIsolationFloorRequest {
            name: ids.tenant.clone(),
            level: IsolationLevel::IsolationLevel0.into(),
            reason: "mine".into(),
            ask_level: 0,
        }
        .encode_to_vec(),
        "codelia.v1.AdminService.SetMaxLimits" => {
            let limits = Some(Limits { pids: Some(7), ..Default::default() });
            SetMaxLimitsRequest { name: ids.tenant.clone(), limits }.encode_to_vec()
        }
        "codelia.v1.AdminService.SetRetention" => {
            SetRetentionRequest { name: ids.tenant.clone(), retention: None }.encode_to_vec()
        }
        "codelia.v1.AdminService.ListWorkers" => ListWorkersRequest::default().encode_to_vec(),
        "codelia.v1.AdminService.DrainWorker" => {
            DrainWorkerRequest { name: "workers/worker-0".into() }.encode_to_vec()
        }
        "codelia.v1.AdminService.SuspendTenant" => {
            SuspendTenantRequest { name: ids.tenant.clone(), reason: "mine".into() }.encode_to_vec()
        }
        "codelia.v1.AdminService.ResumeTenant" => {
            ResumeTenantRequest { name: ids.tenant.clone() }.encode_to_vec()
        }
        "codelia.v1.AdminService.DeleteTenant" => {
            DeleteTenantRequest { name: ids.tenant.clone(), force: true, allow_missing: true }
                .encode_to_vec()
        }
        "codelia.v1.AdminService.ListTenantRuns" => {
            ListTenantRunsRequest::default().encode_to_vec()
        }
        "codelia.v1.AdminService.CancelTenantRun" => {
            let run = ids.run.rsplit('/').next().unwrap_or_default();
            let name = format!("{}/runs/{run}", ids.tenant);
            CancelTenantRunRequest { name, reason: "mine".into(), grace: None }.encode_to_vec()
        }
        "codelia.v1.AuditService.VerifyEvents" => Vec::new(),
        "codelia.v1.FlagService.SetFlag" => {
            let rule = FlagRule { mode: SandboxMode::Logical.into(), ..Default::default() };
            SetFlagRequest {
                name: "flags/mine".into(),
                rule: Some(rule),
                reason: "mine".into(),
                force: true,
            }
            .encode_to_vec()
        }
        "codelia.v1.FlagService.GetFlag" => {
            GetFlagRequest { name: "flags/mine".into() }.encode_to_vec()
        }
        "codelia.v1.FlagService.ListFlags" => ListFlagsRequest::default().encode_to_vec(),
        "codelia.v1.FlagService.ListFlagHistory" => {
            ListFlagHistoryRequest { name: "flags/mine".into(), ..Default::default() }
                .encode_to_vec()
        }
        "codelia.v1.FlagService.RollbackFlag" => {
            RollbackFlagRequest { name: "flags/mine".into(), reason: "mine".into(), revision: None }
                .encode_to_vec()
        }
        "codelia.v1.ToolService.ApproveToolLevel" => {
            let name = format!("{}/tools/theirs", ids.tenant);
            let level = IsolationLevel::IsolationLevel0.into();
            ApproveToolLevelRequest { name, version: 1, level, reason: "mine".into() }
                .encode_to_vec()
        }
        "codelia.v1.AdminService.UndrainWorker" => {
            UndrainWorkerRequest { name: "workers/worker-0".into() }.encode_to_vec()
        }
        _ => return None,
    })
}

/// Returns valid ids of resources that do not exist.
fn missing_ids() -> Ids {
    let (session, run, key) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    Ids {
        session: format!("sessions/{session}"),
        alias: "sessions/no-such-alias".into(),
        run: format!("sessions/{session}/runs/{run}"),
        tenant: "tenants/no-such-tenant".into(),
        key: format!("tenants/no-such-tenant/keys/{key}"),
        approval: format!("approvals/{}", Uuid::now_v7()),
    }
}

/// Creates resources of another tenant and returns their ids.
async fn owned_by(cluster: &Cluster, client: &Client) -> Result<Ids> {
    let session = client
        .create(CreateSessionRequest { alias: "secret-alias".into(), ..Default::default() })
        .await?;
    let run = client.exec(&session.name, "echo secret").await?.run().clone();
    // The file exists, so NOT_FOUND is not due to a missing file.
    client.put(&session.name, "secret", "a").await?;
    let request = CreateKeyRequest {
        parent: "tenants/-".into(),
        scopes: vec![Scope::Run.into()],
        ..Default::default()
    };
    let key = client.admin().create_key(request).await?.into_inner().key.unwrap_or_default();
    let declaration = ToolDeclaration {
        owner: "owner".into(),
        executables: vec!["sh".into()],
        ..Default::default()
    };
    let name = "tools/theirs".to_owned();
    let request =
        RegisterToolRequest { name, declaration: Some(declaration), expected_version: Some(0) };
    client.tools().register_tool(request).await?;
    let volume = CreateVolumeRequest { volume_id: "theirs".into(), ..Default::default() };
    client.volumes().create_volume(volume).await?;
    let alias = "sessions/secret-alias".into();
    let held = HeldRun::record(cluster, client, &session, "true", Duration::from_secs(600)).await?;
    Ok(Ids {
        session: session.name,
        alias,
        run: run.name,
        tenant: "tenants/owner".into(),
        key: key.name,
        approval: held.approval,
    })
}

/// The name of what was not found, which must be the one in the request.
fn missing_name<'a>(message: &'a str, request: &[u8]) -> &'a str {
    let name = message.split('"').nth(1).unwrap_or_default();
    assert!(String::from_utf8_lossy(request).contains(name), "{message} names something else");
    name
}

/// Returns everything of an answer that a caller can compare.
async fn answer(client: &Client, method: &Method, request: &[u8]) -> (Code, String, String) {
    match call(client, method, request.to_vec()).await {
        Ok(_) => (Code::Ok, String::new(), String::new()),
        Err(status) => {
            let name = missing_name(status.message(), request);
            let without_name = |text: &str| text.replace(&format!("\"{name}"), "\"");
            let details = format!("{:?}", status.get_error_details());
            (status.code(), without_name(status.message()), without_name(&details))
        }
    }
}

async fn check(
    client: &Client,
    method: &Method,
    foreign: Expected,
    missing: Expected,
    ids: &Ids,
) -> Result<()> {
    let name = method.full_name();
    match (foreign, missing) {
        (Expected::NotFound(foreign), Expected::NotFound(missing)) => {
            for (foreign, missing) in foreign.iter().zip(&missing) {
                let foreign = answer(client, method, foreign).await;
                assert_eq!(foreign.0, Code::NotFound, "{name}: {foreign:?}");
                let missing = answer(client, method, missing).await;
                assert_eq!(foreign, missing, "{name} answers differently for foreign ids");
            }
        }
        (Expected::Denied(request), _) => {
            let status = call(client, method, request).await.expect_err(name);
            assert_eq!(refusal(&status).code, Code::PermissionDenied, "{name}");
        }
        (Expected::Unmentioned(request), _) => {
            let answer = call(client, method, request).await?.unwrap_or_default();
            let text = String::from_utf8_lossy(&answer);
            for id in [&ids.session, &ids.alias, &ids.run, &ids.tenant] {
                let id = id.rsplit('/').next().unwrap_or_default();
                assert!(!text.contains(id), "{name} shows {id}");
            }
        }
        _ => unreachable!("the table does not depend on the ids"),
    }
    Ok(())
}

#[tokio::test]
async fn foreign_ids_are_not_found_on_every_method() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let owner = cluster.tenant("owner").await?;
    let other = cluster.tenant("other").await?;
    let (ids, missing) = (owned_by(&cluster, &owner).await?, missing_ids());
    for method in all_methods()? {
        let name = method.full_name();
        let Some(foreign) = expected(name, &ids) else {
            panic!("{name} is missing in the table of this test")
        };
        let Some(missing) = expected(name, &missing) else { unreachable!("the table has it") };
        check(&other, &method, foreign, missing, &ids).await?;
    }
    let session = owner.get_session(&ids.session).await?;
    assert_eq!(session.state(), SessionState::Open, "another tenant ended the owner's session");
    let approval = GetApprovalRequest { name: ids.approval.clone() };
    let approval =
        owner.approvals().get_approval(approval).await?.into_inner().approval.unwrap_or_default();
    assert_eq!(
        approval.state(),
        ApprovalState::Pending,
        "another tenant decided the owner's approval"
    );
    assert_eq!(owner.exec(&ids.session, "echo mine").await?.stdout_text(), "mine\n");
    assert_eq!(
        owner.get(&ids.session, "secret").await?,
        "a",
        "another tenant changed the owner's file"
    );
    cluster.end().await
}

#[tokio::test]
async fn reflection_lists_every_tested_method() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let tested: BTreeSet<_> =
        all_methods()?.iter().map(|method| method.full_name().to_owned()).collect();
    let reflected: BTreeSet<_> = reflected_methods(&client).await?.into_iter().collect();
    assert_eq!(reflected, tested);
    assert!(tested.len() >= 20);
    cluster.end().await
}
