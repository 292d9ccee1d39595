//! Malformed input: corrupts every field of every request in every way its type allows. Fields come
//! from the descriptors, so that a new one cannot be forgotten. Each refusal must name the field,
//! and nothing may be stored.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1::*;
use codelia_tests::{Client, Cluster, HeldRun, Method, all_methods, call, refusal, shell};
use futures::{StreamExt, stream};
use prost::Message;
use prost_reflect::{
    DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage, Value,
};
use tonic::Code;

/// Longer than any text the API accepts.
const OVERSIZED: usize = 200_000;

/// Requests at the same time.
const CONCURRENT: usize = 8;

/// Names of existing resources, for requests that are valid except for one field.
struct Ids {
    session: String,
    run: String,
    key: String,
    approval: String,
}

/// Valid requests per method, with every message field set. A method that is missing here fails
/// the test.
fn accepted(method: &str, ids: &Ids) -> Option<Vec<Vec<u8>>> {
    let Ids { session, run, .. } = ids;
    let (name, run_name) = (|| session.clone(), || run.clone());
    let get = || GetRunRequest { name: run_name(), ..Default::default() };
    let seconds = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
    let now = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
    let start = || {
        let mut request = shell(session, "true");
        if let Some(command) = &mut request.command {
            command.terminal = Some(Terminal { columns: 80, rows: 24 });
        }
        StartRunRequest { limits: Some(Limits::default()), queue_timeout: seconds(60), ..request }
    };
    let watch = || WatchRunRequest { name: run_name(), position: 0, ..Default::default() };
    let exec = |kind| ExecRequest { kind: Some(kind) }.encode_to_vec();
    let one = |request: Vec<u8>| vec![request];
    Some(match method {
        "codelia.v1.SessionService.CreateSession" => one(CreateSessionRequest {
            limits: Some(Limits::default()),
            ttl: seconds(60),
            idle_ttl: seconds(60),
            ..Default::default()
        }
        .encode_to_vec()),
        "codelia.v1.SessionService.ListSessions" => one(Vec::new()),
        "codelia.v1.AuditService.ListEvents" => {
            let kind = "RUN_ENDED".to_owned();
            one(ListEventsRequest { parent: name(), kind, ..Default::default() }.encode_to_vec())
        }
        "codelia.v1.AuditService.VerifyEvents" => one(Vec::new()),
        "codelia.v1.SessionService.GetSession" => {
            one(GetSessionRequest { name: name() }.encode_to_vec())
        }
        "codelia.v1.SessionService.ExtendSession" => {
            one(ExtendSessionRequest { name: name(), ttl: seconds(60) }.encode_to_vec())
        }
        "codelia.v1.SessionService.UpdateSession" => one(UpdateSessionRequest {
            name: name(),
            update_mask: Some(mask(&["alias", "labels", "ttl", "idle_ttl"])),
            ttl: seconds(3600),
            idle_ttl: seconds(3600),
            ..Default::default()
        }
        .encode_to_vec()),
        "codelia.v1.SessionService.ReleaseSession" => {
            one(ReleaseSessionRequest { name: name(), reason: "malformed".into() }.encode_to_vec())
        }
        "codelia.v1.SessionService.CloseSession" => {
            one(CloseSessionRequest { name: name() }.encode_to_vec())
        }
        "codelia.v1.RunService.StartRun" => one(start().encode_to_vec()),
        "codelia.v1.RunService.WatchRun" => one(watch().encode_to_vec()),
        "codelia.v1.RunService.Exec" => {
            vec![
                exec(exec_request::Kind::Start(start())),
                exec(exec_request::Kind::Attach(watch())),
            ]
        }
        "codelia.v1.RunService.GetRun" => one(get().encode_to_vec()),
        "codelia.v1.RunService.ListRuns" => one(ListRunsRequest {
            parent: name(),
            created_after: now,
            created_before: now,
            ..Default::default()
        }
        .encode_to_vec()),
        "codelia.v1.RunService.CancelRun" => {
            one(CancelRunRequest { name: run_name(), grace: seconds(1), ..Default::default() }
                .encode_to_vec())
        }
        "codelia.v1.RunService.SignalRun" => {
            one(SignalRunRequest { name: run_name(), signal: 15 }.encode_to_vec())
        }
        "codelia.v1.PolicyService.ExplainPolicy" => {
            one(ExplainPolicyRequest { session: name(), ..Default::default() }.encode_to_vec())
        }
        _ => {
            return of_changes(method, run_name())
                .or_else(|| of_scope_policies(method))
                .or_else(|| of_admin(method, ids))
                .or_else(|| of_operator(method, ids))
                .or_else(|| of_flags(method))
                .or_else(|| of_tools(method))
                .or_else(|| of_volumes(method))
                .or_else(|| of_approvals(method, ids))
                .or_else(|| of_files(method, name()));
        }
    })
}

/// Valid requests of the services that administer and inform.
fn of_admin(method: &str, ids: &Ids) -> Option<Vec<Vec<u8>>> {
    let quotas = Some(Quotas { sessions: Some(1), ..Default::default() });
    let tenant = || "tenants/operators".to_owned();
    let one = |request: Vec<u8>| vec![request];
    Some(match method {
        "codelia.v1.AdminService.CreateTenant" => {
            one(CreateTenantRequest { tenant_id: "new".into(), quotas }.encode_to_vec())
        }
        "codelia.v1.AdminService.GetTenant" => {
            one(GetTenantRequest { name: tenant() }.encode_to_vec())
        }
        "codelia.v1.AdminService.ListTenants" | "codelia.v1.AdminService.ListWorkers" => {
            one(Vec::new())
        }
        "codelia.v1.AdminService.UpdateQuotas" => {
            one(UpdateQuotasRequest { name: tenant(), quotas, update_mask: None }.encode_to_vec())
        }
        "codelia.v1.AdminService.SetIsolationFloor" => one(SetIsolationFloorRequest {
            name: tenant(),
            level: IsolationLevel::IsolationLevel2.into(),
            reason: "because".into(),
            ask_level: IsolationLevel::IsolationLevel0.into(),
        }
        .encode_to_vec()),
        "codelia.v1.AdminService.CreateKey" => one(CreateKeyRequest {
            parent: tenant(),
            display_name: "new".into(),
            scopes: vec![Scope::Run.into()],
            expire_time: Some(prost_types::Timestamp { seconds: 4_000_000_000, nanos: 0 }),
        }
        .encode_to_vec()),
        "codelia.v1.AdminService.ListKeys" => {
            one(ListKeysRequest { parent: tenant(), ..Default::default() }.encode_to_vec())
        }
        "codelia.v1.AdminService.RevokeKey" => {
            one(RevokeKeyRequest { name: ids.key.clone() }.encode_to_vec())
        }
        "codelia.v1.AdminService.DrainWorker" => {
            one(DrainWorkerRequest { name: "workers/worker-0".into() }.encode_to_vec())
        }
        "codelia.v1.AdminService.UndrainWorker" => {
            one(UndrainWorkerRequest { name: "workers/worker-0".into() }.encode_to_vec())
        }
        "codelia.v1.InfoService.GetServerInfo" | "codelia.v1.InfoService.WhoAmI" => one(Vec::new()),
        "codelia.v1.AdminService.SetRetention" => {
            let time = |seconds| Some(prost_types::Duration { seconds, nanos: 0 });
            let retention = Retention { runs: time(700), output: time(600), audit: time(700) };
            one(SetRetentionRequest { name: tenant(), retention: Some(retention) }.encode_to_vec())
        }
        "codelia.v1.AdminService.SetMaxLimits" => {
            let seconds = Some(prost_types::Duration { seconds: 7, nanos: 0 });
            let limits = Some(Limits { timeout: seconds, cpu_time: seconds, ..Default::default() });
            one(SetMaxLimitsRequest { name: tenant(), limits }.encode_to_vec())
        }
        _ => return None,
    })
}

/// Valid requests about the tenants and runs of others.
fn of_operator(method: &str, ids: &Ids) -> Option<Vec<Vec<u8>>> {
    let run_id = ids.run.rsplit('/').next().unwrap_or_default();
    let tenant = || "tenants/operators".to_owned();
    let one = |request: Vec<u8>| vec![request];
    Some(match method {
        "codelia.v1.AdminService.SuspendTenant" => {
            one(SuspendTenantRequest { name: "tenants/nobody".into(), reason: "x".into() }
                .encode_to_vec())
        }
        "codelia.v1.AdminService.ResumeTenant" => {
            one(ResumeTenantRequest { name: "tenants/nobody".into() }.encode_to_vec())
        }
        "codelia.v1.AdminService.DeleteTenant" => {
            one(DeleteTenantRequest { name: "tenants/nobody".into(), ..Default::default() }
                .encode_to_vec())
        }
        "codelia.v1.AdminService.ListTenantRuns" => {
            one(ListTenantRunsRequest { tenant: tenant(), ..Default::default() }.encode_to_vec())
        }
        "codelia.v1.AdminService.CancelTenantRun" => one(CancelTenantRunRequest {
            name: format!("{}/runs/{run_id}", tenant()),
            reason: "x".into(),
            grace: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        }
        .encode_to_vec()),
        _ => return None,
    })
}

/// Valid requests about the changes of a run.
fn of_changes(method: &str, name: String) -> Option<Vec<Vec<u8>>> {
    Some(vec![match method {
        "codelia.v1.RunService.ApplyChanges" => ApplyChangesRequest { name }.encode_to_vec(),
        "codelia.v1.RunService.DiscardChanges" => DiscardChangesRequest { name }.encode_to_vec(),
        _ => return None,
    }])
}

/// Valid requests of the tool service.
fn of_tools(method: &str) -> Option<Vec<Vec<u8>>> {
    let (name, reason) = ("tools/formatter".to_owned(), "because".to_owned());
    Some(vec![match method {
        "codelia.v1.ToolService.RegisterTool" => {
            let declaration = ToolDeclaration {
                owner: "me".into(),
                executables: vec!["black".into()],
                command_pattern: None,
                policy: Some(Policy::default()),
                transactional: false,
            };
            RegisterToolRequest { name, declaration: Some(declaration), expected_version: Some(0) }
                .encode_to_vec()
        }
        "codelia.v1.ToolService.GetTool" => GetToolRequest { name }.encode_to_vec(),
        "codelia.v1.ToolService.ListTools" => {
            ListToolsRequest { parent: "tenants/operators".into(), ..Default::default() }
                .encode_to_vec()
        }
        "codelia.v1.ToolService.DeleteTool" => DeleteToolRequest { name }.encode_to_vec(),
        "codelia.v1.ToolService.ApproveToolLevel" => ApproveToolLevelRequest {
            name,
            version: 1,
            level: IsolationLevel::IsolationLevel0.into(),
            reason,
        }
        .encode_to_vec(),
        "codelia.v1.ToolService.QuarantineTool" => {
            QuarantineToolRequest { name, reason }.encode_to_vec()
        }
        "codelia.v1.ToolService.ReleaseTool" => ReleaseToolRequest { name, reason }.encode_to_vec(),
        _ => return None,
    }])
}

/// Valid requests of the volume service.
fn of_volumes(method: &str) -> Option<Vec<Vec<u8>>> {
    let name = "volumes/cargo".to_owned();
    Some(vec![match method {
        "codelia.v1.VolumeService.CreateVolume" => CreateVolumeRequest {
            volume_id: "cargo".into(),
            project: "web".into(),
            max_bytes: Some(1 << 30),
            ttl: Some(prost_types::Duration { seconds: 3600, nanos: 0 }),
        }
        .encode_to_vec(),
        "codelia.v1.VolumeService.GetVolume" => GetVolumeRequest { name }.encode_to_vec(),
        "codelia.v1.VolumeService.ListVolumes" => {
            ListVolumesRequest { page_size: 1, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.VolumeService.DeleteVolume" => DeleteVolumeRequest { name }.encode_to_vec(),
        _ => return None,
    }])
}

/// Valid requests about the policies of scopes.
fn of_scope_policies(method: &str) -> Option<Vec<Vec<u8>>> {
    let (scope, name, reason) =
        (PolicyScope::Project.into(), "web".to_owned(), "because".to_owned());
    let policy = Some(Policy { delegate: vec!["process.debug".to_owned()], ..Default::default() });
    Some(vec![match method {
        "codelia.v1.PolicyService.CheckPolicy" => {
            CheckPolicyRequest { policy: Some(Policy::default()), mode: 0 }.encode_to_vec()
        }
        "codelia.v1.PolicyService.SetScopePolicy" => {
            SetScopePolicyRequest { scope, name, policy, reason, expected_version: None }
                .encode_to_vec()
        }
        "codelia.v1.PolicyService.GetScopePolicy" => {
            GetScopePolicyRequest { scope, name, version: 0 }.encode_to_vec()
        }
        "codelia.v1.PolicyService.DeleteScopePolicy" => DeleteScopePolicyRequest {
            scope,
            name: "none".into(),
            reason,
            expected_version: Some(1),
        }
        .encode_to_vec(),
        "codelia.v1.PolicyService.RollbackScopePolicy" => {
            RollbackScopePolicyRequest { scope, name, version: 1, reason }.encode_to_vec()
        }
        "codelia.v1.PolicyService.ListScopePolicyVersions" => {
            ListScopePolicyVersionsRequest { scope, name, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.PolicyService.ListProjects" => {
            ListProjectsRequest { page_size: 3, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.PolicyService.ListProfiles" => ListProfilesRequest {}.encode_to_vec(),
        "codelia.v1.PolicyService.GetProfile" => {
            GetProfileRequest { name: "cargo".to_owned() }.encode_to_vec()
        }
        "codelia.v1.PolicyService.DryRunScopePolicy" => {
            let since = Some(prost_types::Duration { seconds: 60, nanos: 0 });
            DryRunScopePolicyRequest { scope, name, policy, since, ..Default::default() }
                .encode_to_vec()
        }
        _ => return None,
    }])
}

/// Valid requests of the flag service.
fn of_flags(method: &str) -> Option<Vec<Vec<u8>>> {
    let (name, reason) = ("flags/canary".to_owned(), "because".to_owned());
    Some(vec![match method {
        "codelia.v1.FlagService.SetFlag" => {
            let guard = FlagGuard {
                max_refused_percent: Some(1),
                max_setup_p95: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
                ..Default::default()
            };
            let mode = SandboxMode::Logical.into();
            let rule = FlagRule { mode, guard: Some(guard), ..Default::default() };
            SetFlagRequest { name, rule: Some(rule), reason, force: false }.encode_to_vec()
        }
        "codelia.v1.FlagService.GetFlag" => GetFlagRequest { name }.encode_to_vec(),
        "codelia.v1.FlagService.ListFlags" => Vec::new(),
        "codelia.v1.FlagService.ListFlagHistory" => {
            ListFlagHistoryRequest { name, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.FlagService.RollbackFlag" => {
            RollbackFlagRequest { name, reason, revision: Some(1) }.encode_to_vec()
        }
        _ => return None,
    }])
}

/// Valid requests of the approval service.
fn of_approvals(method: &str, ids: &Ids) -> Option<Vec<Vec<u8>>> {
    let (parent, name) = (ids.session.clone(), ids.approval.clone());
    Some(vec![match method {
        "codelia.v1.ApprovalService.ListApprovals" => {
            ListApprovalsRequest { parent, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.ApprovalService.WatchApprovals" => {
            WatchApprovalsRequest { parent }.encode_to_vec()
        }
        "codelia.v1.ApprovalService.GetApproval" => GetApprovalRequest { name }.encode_to_vec(),
        "codelia.v1.ApprovalService.DecideApproval" => {
            let decision = ApprovalDecision::Allow.into();
            DecideApprovalRequest { name, decision, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.ApprovalService.RevokeApproval" => {
            RevokeApprovalRequest { name, ..Default::default() }.encode_to_vec()
        }
        _ => return None,
    }])
}

fn mask(paths: &[&str]) -> prost_types::FieldMask {
    prost_types::FieldMask { paths: paths.iter().map(|&path| path.to_owned()).collect() }
}

/// Valid requests of the file service.
fn of_files(method: &str, parent: String) -> Option<Vec<Vec<u8>>> {
    let path = || "file".to_owned();
    let (source_path, destination_path) = (path(), "other".to_owned());
    Some(vec![match method {
        "codelia.v1.FileService.WriteFile" => {
            let open = WriteFileOpen { parent, path: path(), ..Default::default() };
            WriteFileRequest { kind: Some(write_file_request::Kind::Open(open)) }.encode_to_vec()
        }
        "codelia.v1.FileService.ReadFile" => {
            ReadFileRequest { parent, path: path(), ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.FileService.StatFile" => {
            StatFileRequest { parent, path: path(), no_follow: false }.encode_to_vec()
        }
        "codelia.v1.FileService.ListFiles" => {
            ListFilesRequest { parent, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.FileService.MakeDirectory" => {
            MakeDirectoryRequest { parent, path: path(), parents: false }.encode_to_vec()
        }
        "codelia.v1.FileService.MoveFile" => {
            MoveFileRequest { parent, source_path, destination_path, overwrite: false }
                .encode_to_vec()
        }
        "codelia.v1.FileService.CopyFile" => {
            CopyFileRequest { parent, source_path, destination_path, overwrite: false }
                .encode_to_vec()
        }
        "codelia.v1.FileService.RemoveFile" => {
            RemoveFileRequest { parent, path: path(), recursive: false }.encode_to_vec()
        }
        "codelia.v1.FileService.ExportFiles" => {
            ExportFilesRequest { parent, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.FileService.WatchFiles" => {
            WatchFilesRequest { parent, ..Default::default() }.encode_to_vec()
        }
        "codelia.v1.FileService.ImportFiles" => {
            let open = ImportFilesOpen { parent, ..Default::default() };
            ImportFilesRequest { kind: Some(import_files_request::Kind::Open(open)) }
                .encode_to_vec()
        }
        "codelia.v1.FileService.EditFile" => {
            EditFileRequest { parent, path: path(), old_text: "a".into(), ..Default::default() }
                .encode_to_vec()
        }
        _ => return None,
    }])
}

/// A request with one corrupt field.
struct Corrupt {
    field: String,
    message: DynamicMessage,
}

/// Returns the message with each field corrupted in every way.
fn corrupt_fields(message: &DynamicMessage) -> Vec<Corrupt> {
    let fields = message.descriptor();
    // Of a oneof, only the member that is set.
    let present = |field: &FieldDescriptor| {
        field.containing_oneof().is_none_or(|one| one.is_synthetic()) || message.has_field(field)
    };
    fields.fields().filter(present).flat_map(|field| corrupt_field(message, &field)).collect()
}

fn corrupt_field(message: &DynamicMessage, field: &FieldDescriptor) -> Vec<Corrupt> {
    let with = |value: Value| {
        let mut copy = message.clone();
        copy.set_field(field, value);
        // A run is either in a session or in a new one.
        if field.name() == "new_session" {
            copy.clear_field_by_name("parent");
        }
        copy
    };
    let mut corrupt: Vec<Corrupt> = bad_values(field)
        .into_iter()
        .map(|value| Corrupt { field: field.name().to_owned(), message: with(value) })
        .collect();
    if let (Kind::Message(inside), false) = (field.kind(), field.is_list() || field.is_map())
        && !is_well_known(&inside)
        && let Some(inner) = message.get_field(field).as_message()
    {
        corrupt.extend(corrupt_fields(inner).into_iter().map(|corrupt| Corrupt {
            field: format!("{}.{}", field.name(), corrupt.field),
            message: with(Value::Message(corrupt.message)),
        }));
    }
    corrupt
}

fn is_well_known(message: &MessageDescriptor) -> bool {
    message.full_name().starts_with("google.protobuf.")
}

/// Returns values that a field of this type must not accept.
fn bad_values(field: &FieldDescriptor) -> Vec<Value> {
    if field.is_map() {
        return bad_maps();
    }
    if field.is_list() {
        return bad_lists(field);
    }
    match field.kind() {
        Kind::String => bad_texts(field.name()),
        Kind::Int32 => vec![Value::I32(-1), Value::I32(i32::MIN)],
        Kind::Int64 => vec![Value::I64(-1), Value::I64(i64::MIN)],
        Kind::Bytes => vec![Value::Bytes(vec![0; 3 << 20].into())],
        Kind::Enum(_) => vec![Value::EnumNumber(9999), Value::EnumNumber(-1)],
        Kind::Message(inside) if inside.name() == "FieldMask" => vec![bad_mask(inside)],
        Kind::Message(inside) if is_well_known(&inside) => {
            bad_times(&inside, field.name() == "grace")
        }
        Kind::Message(_) | Kind::Bool => Vec::new(),
        other => panic!("unsupported field type {other:?}: {}", field.full_name()),
    }
}

fn bad_texts(field: &str) -> Vec<Value> {
    let mut texts = vec!["a\0b".to_owned(), "x".repeat(OVERSIZED)];
    if field.ends_with("path") {
        texts.extend(
            ["..", "a/../b", "/", "/etc/passwd", "/workspacex", "a/../../b"].map(str::to_owned),
        );
    }
    if matches!(field, "name" | "parent") {
        let wrong = [
            "",
            "sessions/",
            "sessions/../..",
            "sessions/A B",
            "tenants/A/keys/1",
            "workers/",
            "é",
        ];
        texts.extend(wrong.map(str::to_owned));
    }
    texts.into_iter().map(Value::String).collect()
}

fn bad_mask(message: MessageDescriptor) -> Value {
    let mut mask = DynamicMessage::new(message);
    mask.set_field_by_name("paths", Value::List(vec![Value::String("nosuch".to_owned())]));
    Value::Message(mask)
}

/// Values of a time that must not be accepted; some durations may be zero.
fn bad_times(message: &MessageDescriptor, may_be_zero: bool) -> Vec<Value> {
    let pairs: &[(i64, i32)] = match message.name() {
        "Duration" => &[(-1, 0), (0, -1), (0, 0), (1, 2_000_000_000), (i64::MAX, 0), (i64::MIN, 0)],
        "Timestamp" => &[(i64::MAX, 0), (i64::MIN, 0), (1, -1), (1, 2_000_000_000)],
        other => panic!("unsupported message type {other}"),
    };
    let time = |&(seconds, nanos): &(i64, i32)| {
        let mut time = DynamicMessage::new(message.clone());
        time.set_field_by_name("seconds", Value::I64(seconds));
        time.set_field_by_name("nanos", Value::I32(nanos));
        Value::Message(time)
    };
    pairs.iter().filter(|pair| !(may_be_zero && **pair == (0, 0))).map(time).collect()
}

fn bad_maps() -> Vec<Value> {
    let entry =
        |key: &str, value: &str| (MapKey::String(key.to_owned()), Value::String(value.to_owned()));
    let mut maps = vec![
        entry("", "x"),
        entry("a\0", "x"),
        entry("a", "\0"),
        entry(&"k".repeat(OVERSIZED), ""),
    ]
    .into_iter()
    .map(|entry| Value::Map(HashMap::from([entry])))
    .collect::<Vec<_>>();
    maps.push(Value::Map((0..20_000).map(|number| entry(&format!("k{number}"), "")).collect()));
    maps
}

fn bad_lists(field: &FieldDescriptor) -> Vec<Value> {
    let text = |text: &str| Value::String(text.to_owned());
    let mut lists = match field.kind() {
        Kind::String => {
            let oversized = text(&"x".repeat(OVERSIZED));
            vec![
                vec![],
                vec![text("")],
                vec![text("a\0")],
                vec![oversized],
                vec![text("x"); 100_000],
            ]
        }
        Kind::Enum(_) => vec![vec![], vec![Value::EnumNumber(0)], vec![Value::EnumNumber(9999)]],
        Kind::Int32 => vec![vec![Value::I32(-1)], vec![Value::I32(i32::MIN)]],
        // Without its required fields, and too many of them.
        Kind::Message(message) => {
            let empty = Value::Message(DynamicMessage::new(message));
            vec![vec![empty.clone()], vec![empty; 100]]
        }
        other => panic!("unsupported list type {other:?}: {}", field.full_name()),
    };
    // Policy lists and names in responses may be empty.
    if matches!(
        field.parent_message().name(),
        "Policy"
            | "FilesystemPolicy"
            | "NetworkPolicy"
            | "SyscallPolicy"
            | "CommandPolicy"
            | "TextList"
    ) || field.name().ends_with("env_names")
    {
        lists.retain(|list| !list.is_empty());
    }
    lists.into_iter().map(Value::List).collect()
}

/// Returns whether the refusal names the corrupt field. In a stream of several kinds of messages
/// the kind may be omitted. For an optional list, the list or its entries may be named.
fn names(named: &str, field: &str) -> bool {
    let field = field.strip_suffix(".values").unwrap_or(field);
    if named.strip_prefix(field).is_some_and(|entry| entry.starts_with('[')) {
        return true;
    }
    let named = named
        .strip_suffix(']')
        .and_then(|named| named.rsplit_once('['))
        .map_or(named, |(list, _)| list);
    named == field
        // A field of an entry.
        || named.strip_prefix(field).is_some_and(|rest| rest.starts_with('['))
        // Lists of a session that the mask does not name are refused as a whole.
        || named == "network" && field.starts_with("network.")
        || field.strip_prefix("start.").or(field.strip_prefix("attach.")).is_some_and(|rest| rest == named)
}

async fn refused(client: &Client, method: &Method, corrupt: &Corrupt) {
    let at = format!("{} with a bad {}", method.full_name(), corrupt.field);
    let Err(status) = call(client, method, corrupt.message.encode_to_vec()).await else {
        panic!("{at} was accepted")
    };
    assert_eq!(status.code(), Code::InvalidArgument, "{at}: {status:?}");
    let refusal = refusal(&status);
    assert!(
        refusal.fields.iter().any(|named| names(named, &corrupt.field)),
        "{at}: names {:?}",
        refusal.fields
    );
}

/// Counts the rows of every table except events and audit, which record refusals above a ceiling,
/// and what workers measure.
async fn row_counts(cluster: &Cluster) -> Result<Vec<(String, i64)>> {
    let mut counts = cluster.database.row_counts().await?;
    counts.retain(|(table, _)| {
        !matches!(table.as_str(), "events" | "audit" | "audit_checkpoints" | "session_disk")
    });
    Ok(counts)
}

async fn existing(cluster: &Cluster, client: &Client) -> Result<Ids> {
    let session = client.session().await?;
    let run = client.exec(&session.name, "true").await?.run().name.clone();
    let request = CreateKeyRequest {
        parent: "tenants/-".into(),
        scopes: vec![Scope::Run.into()],
        ..Default::default()
    };
    let key = client.admin().create_key(request).await?.into_inner().key.context("the key")?;
    let held = HeldRun::record(cluster, client, &session, "true", Duration::from_secs(600)).await?;
    Ok(Ids { session: session.name, run, key: key.name, approval: held.approval })
}

#[tokio::test]
async fn every_method_names_bad_field_and_stores_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let ids = existing(&cluster, &operator).await?;
    let before = row_counts(&cluster).await?;
    let mut tried = 0;
    for method in all_methods()? {
        let name = method.full_name();
        let Some(requests) = accepted(name, &ids) else {
            panic!("{name} is missing in the table of this test")
        };
        for request in requests {
            let corrupt =
                corrupt_fields(&DynamicMessage::decode(method.input(), request.as_slice())?);
            tried += corrupt.len();
            let calls = corrupt.iter().map(|one| refused(&operator, &method, one));
            stream::iter(calls).buffer_unordered(CONCURRENT).collect::<()>().await;
        }
    }
    assert!(tried > 200, "only {tried} requests were sent");
    assert_eq!(row_counts(&cluster).await?, before, "something was stored");
    assert_eq!(operator.get_session(&ids.session).await?.state(), SessionState::Open);
    cluster.end().await
}

#[tokio::test]
async fn empty_request_names_missing_fields() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    // Methods without required fields.
    let optional = "CreateSession ListSessions ListTenants ListWorkers ExplainPolicy GetServerInfo WhoAmI \
                    ListTenantRuns ListFlags VerifyEvents ListTools ListProjects ListProfiles \
                    ListVolumes";
    let is_optional = |name: &str| optional.split_whitespace().any(|optional| optional == name);
    for method in all_methods()?.iter().filter(|method| !is_optional(method.name())) {
        let name = method.full_name();
        let status = call(&operator, method, Vec::new()).await.expect_err(name);
        assert_eq!(status.code(), Code::InvalidArgument, "{name}: {status:?}");
        assert!(!refusal(&status).fields.is_empty(), "{name}");
    }
    cluster.end().await
}

#[tokio::test]
async fn million_environment_variables_are_refused() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    // The larger request is refused before it is read.
    for (count, field) in [(100_000, "command.env"), (1_000_000, "request")] {
        let mut request = shell(&session.name, "true");
        let command = request.command.as_mut().context("a command")?;
        command.env = (0..count).map(|number| (format!("V{number}"), String::new())).collect();
        let status = client.start(request).await.expect_err("many variables");
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert_eq!(refusal(&status).fields, [field]);
    }
    cluster.end().await
}

#[tokio::test]
async fn invalid_exec_messages_are_refused() -> Result<()> {
    use exec_request::Kind::{
        Attach, CloseStdin as Close, Detach as Leave, Resize, Signal, Start, Stdin,
    };
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let firsts = [
        Stdin("x".into()),
        Close(CloseStdin {}),
        Resize(Terminal { columns: 1, rows: 1 }),
        Signal(1),
        Leave(Detach {}),
    ];
    for first in firsts {
        let status = match codelia_tests::Exec::open(&client, first.clone(), 0).await {
            Ok(mut exec) => exec.advance().await.expect_err("a wrong first message"),
            Err(status) => status,
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{first:?}: {status:?}");
    }
    let bad = [
        (Signal(0), "signal"),
        (Signal(999), "signal"),
        (Resize(Terminal { columns: 0, rows: 1 }), "resize.columns"),
        (Stdin(vec![0; 3 << 20]), "stdin"),
        (Start(shell(&session.name, "true")), "start"),
        (Attach(WatchRunRequest::default()), "attach"),
    ];
    for (message, field) in bad {
        let mut exec =
            codelia_tests::Exec::start(&client, shell(&session.name, "exec sleep 100")).await?;
        exec.until_started().await?;
        exec.send(message).await?;
        let status = loop {
            match exec.advance().await {
                Ok(true) => {}
                Ok(false) => panic!("{field}: accepted"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
        assert!(
            refusal(&status).fields.iter().any(|named| named.starts_with(field)),
            "{field}: {status:?}"
        );
    }
    cluster.end().await
}

#[tokio::test]
async fn undecodable_bytes_are_refused() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    for method in all_methods()? {
        let status = call(&client, &method, vec![0xff; 64]).await.expect_err("not a message");
        assert_ne!(status.code(), Code::Unknown, "{}: {status:?}", method.full_name());
    }
    client.session().await?;
    cluster.end().await
}
