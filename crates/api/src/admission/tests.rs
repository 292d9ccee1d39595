use std::{sync::Arc, time::Duration};

use codelia_policy::{
    IsolationLevel, Limits, LimitsRequest, Policy, RunSpec, SessionFlags, ToolDeclaration,
};
use codelia_proto::v1;
use codelia_store::{ApprovalKind, SecretKey, SessionSpec, Tool, ToolApproval, ToolQuarantine};
use codelia_types::{ByteSize, CommandSpec, Cores, KeyId, Mode, NetworkMode, Reason};
use time::OffsetDateTime;

use super::{
    approval::{approval_needed, may_ask},
    fingerprint::fingerprint,
    mode::{below_floor, mode_not_allowed},
    rules::Rules,
    run_request::RunRequest,
    session_request::SessionRequest,
};
use crate::{
    error::ApiError,
    options::{ApiOptions, ApprovalOptions, LimitOptions, Options, RunLimits},
};

/// Those of an installation that configures none.
fn limits() -> RunLimits {
    let limits = LimitOptions::default();
    limits.of_runs(ByteSize::mib(512), Cores::ONE, &ApprovalOptions::default()).unwrap()
}

pub(crate) fn options() -> Options {
    Options {
        api: ApiOptions::default(),
        tls: None,
        internal_tls: None,
        limits: limits(),
        policy: Policy::installation(),
        profiles: codelia_policy::Profiles::default(),
        default_mode: Mode::Logical,
        default_network: Some(NetworkMode::None),
        session_ttl: Duration::from_secs(60),
        max_session_ttl: Duration::from_secs(600),
        allow_logical: true,
        unisolated_tenant: None,
        shutdown_grace: Duration::from_secs(1),
        secret_key: None,
        open_files: 1024,
        access_log: false,
        escape: codelia_policy::EscapeOptions::default(),
        webhook: None,
        retention: codelia_store::Retention::default(),
    }
}

pub(crate) fn rules(options: &Options) -> Rules<'_> {
    Rules {
        options,
        ceilings: options.limits.ceilings.clone(),
        floor: IsolationLevel::None,
        ask_floor: None,
        tenant: None,
        scopes: None,
    }
}

fn isolating(options: &Options) -> Rules<'_> {
    Rules { floor: IsolationLevel::Process, ..rules(options) }
}

fn wire() -> v1::StartRunRequest {
    v1::StartRunRequest {
        parent: "sessions/a".into(),
        command: Some(v1::CommandSpec { argv: vec!["true".into()], ..Default::default() }),
        ..Default::default()
    }
}

pub(crate) fn session() -> SessionSpec {
    let requested = LimitsRequest { pids: Some(7), open_files: Some(9), ..Default::default() };
    let limits = requested.or_default(&Limits::default());
    SessionSpec {
        mode: Mode::Logical,
        limits,
        requested_limits: requested,
        network: None,
        policy: Policy::default(),
        flags: SessionFlags::default(),
        scopes: codelia_policy::SessionScopes::default(),
        profile: None,
    }
}

#[test]
fn limits_come_from_run_then_session_then_defaults() {
    let limits = v1::Limits { pids: Some(3), ..Default::default() };
    let request = RunRequest::parse(
        v1::StartRunRequest { limits: Some(limits), ..wire() },
        false,
        &rules(&options()),
    )
    .unwrap();
    let spec = request.to_spec(&session(), &rules(&options())).unwrap();
    assert_eq!((spec.limits.pids, spec.limits.open_files), (3, 9));
    assert_eq!(spec.limits.memory_bytes, Limits::default().memory_bytes);
    assert_eq!((spec.requested_limits.pids, spec.requested_limits.memory_bytes), (Some(3), None));
}

#[test]
fn limit_above_ceiling_is_rejected_by_field() {
    let limits = v1::Limits { cpu_millicores: Some(i64::MAX), ..Default::default() };
    let request = RunRequest::parse(
        v1::StartRunRequest { limits: Some(limits), ..wire() },
        false,
        &rules(&options()),
    )
    .unwrap();
    let error = request.to_spec(&session(), &rules(&options())).unwrap_err();
    assert!(error.invalid_field() == Some("limits.cpu_millicores"));
}

#[test]
fn default_network_does_not_apply_to_logical() {
    let request = RunRequest::parse(wire(), false, &rules(&options())).unwrap();
    assert_eq!(request.to_spec(&session(), &rules(&options())).unwrap().network, None);
    let isolated = SessionSpec { mode: Mode::Bwrap, ..session() };
    assert_eq!(
        request.to_spec(&isolated, &rules(&options())).unwrap().network,
        Some(NetworkMode::None)
    );
}

#[test]
fn logical_is_rejected_where_not_allowed() {
    let strict = Options { allow_logical: false, ..options() };
    let request = RunRequest::parse(wire(), false, &rules(&options())).unwrap();
    let expected = mode_not_allowed(Mode::Logical);
    assert_eq!(request.to_spec(&session(), &rules(&strict)).unwrap_err(), expected);
    let request =
        SessionRequest::parse(v1::CreateSessionRequest::default(), &rules(&strict)).unwrap();
    assert_eq!(request.to_spec(&rules(&strict)).unwrap_err(), expected);
}

#[test]
fn mode_below_isolation_floor_is_rejected() {
    let below = below_floor(Mode::Logical, IsolationLevel::Process);
    let run = RunRequest::parse(wire(), false, &rules(&options())).unwrap();
    assert_eq!(run.to_spec(&session(), &isolating(&options())).unwrap_err(), below);
    let session_in = |mode: v1::SandboxMode| {
        let wire = v1::CreateSessionRequest { mode: mode.into(), ..Default::default() };
        SessionRequest::parse(wire, &rules(&options())).unwrap().to_spec(&isolating(&options()))
    };
    assert_eq!(session_in(v1::SandboxMode::Logical).unwrap_err(), below);
    let isolated = session_in(v1::SandboxMode::Bwrap).unwrap();
    let weaker = v1::StartRunRequest { mode: v1::SandboxMode::Logical.into(), ..wire() };
    let weaker = RunRequest::parse(weaker, false, &rules(&options())).unwrap();
    assert_eq!(weaker.to_spec(&isolated, &isolating(&options())).unwrap_err(), below);
}

#[test]
fn mode_below_floor_needs_approval_if_operator_permits() {
    let options = options();
    let asking = Rules {
        floor: IsolationLevel::Full,
        ask_floor: Some(IsolationLevel::None),
        ..rules(&options)
    };
    let run =
        RunRequest::parse(wire(), false, &asking).unwrap().to_spec(&session(), &asking).unwrap();
    let need = approval_needed(&run, &options, asking.floor).unwrap();
    assert_eq!(need.grant.kind, ApprovalKind::Isolation);
    assert!(
        need.message.contains("isolation LEVEL_0 instead of LEVEL_2 (mode logical)"),
        "{need:?}"
    );
    assert_eq!(approval_needed(&run, &options, IsolationLevel::None), None, "within the floor");
    let not_so_low = Rules { ask_floor: Some(IsolationLevel::Process), ..asking };
    let refused =
        RunRequest::parse(wire(), false, &not_so_low).unwrap().to_spec(&session(), &not_so_low);
    let below = below_floor(Mode::Logical, IsolationLevel::Full);
    assert_eq!(refused.unwrap_err(), below);
    // A floor that was lowered later is what counts.
    let lowered = Rules { floor: IsolationLevel::None, ..not_so_low };
    assert!(
        RunRequest::parse(wire(), false, &lowered).unwrap().to_spec(&session(), &lowered).is_ok()
    );
}

#[test]
fn fingerprint_ignores_order_of_maps() {
    let with_labels = |labels: &[&str]| {
        let labels = labels.iter().map(|&key| (key.to_owned(), String::new())).collect();
        fingerprint(
            &RunRequest::parse(v1::StartRunRequest { labels, ..wire() }, false, &rules(&options()))
                .unwrap(),
        )
        .unwrap()
    };
    assert_eq!(with_labels(&["a", "b", "c"]), with_labels(&["c", "b", "a"]));
    assert_ne!(with_labels(&["a", "b"]), with_labels(&["a", "c"]));
}

#[test]
fn fingerprint_ignores_session_name_and_key() {
    let other =
        v1::StartRunRequest { parent: "sessions/b".into(), idempotency_key: "k".into(), ..wire() };
    let hash =
        |wire| fingerprint(&RunRequest::parse(wire, false, &rules(&options())).unwrap()).unwrap();
    assert_eq!(hash(wire()), hash(other));
}

#[test]
fn fingerprint_covers_secret_values() {
    let key = SecretKey::parse(&"5a".repeat(32)).unwrap();
    let with_secret = |value: &str| {
        let mut wire = wire();
        wire.command.as_mut().unwrap().secret_env = [("TOKEN".to_owned(), value.to_owned())].into();
        RunRequest::parse(wire, false, &rules(&options())).unwrap()
    };
    let tenant = "a".parse().unwrap();
    let print = |request: &RunRequest, key| request.fingerprint(&tenant, key).unwrap();
    let one = print(&with_secret("hush"), Some(&key));
    assert_eq!(print(&with_secret("hush"), Some(&key)), one);
    assert_ne!(print(&with_secret("other"), Some(&key)), one);
    assert_ne!(print(&with_secret("hush"), None), one, "the hash needs the key");
}

#[test]
fn secret_variables_need_a_key() {
    let plain = RunRequest::parse(wire(), false, &rules(&options())).unwrap();
    assert!(matches!(plain.secret_key(&options()), Ok(None)));
    let mut wire = wire();
    wire.command.as_mut().unwrap().secret_env = [("TOKEN".to_owned(), "hush".to_owned())].into();
    let secret = RunRequest::parse(wire, false, &rules(&options())).unwrap();
    let refused = secret.secret_key(&options()).unwrap_err();
    assert_eq!(refused.reason(), Reason::SecretsUnavailable);
    assert!(!format!("{secret:?}").contains("hush"));
}

fn policy(yaml: &str) -> Option<v1::Policy> {
    Some((&Policy::parse(yaml, codelia_policy::Format::Yaml).unwrap()).into())
}

fn isolated_session(yaml: &str) -> Result<SessionSpec, ApiError> {
    let wire = v1::CreateSessionRequest {
        mode: v1::SandboxMode::Bwrap.into(),
        policy: policy(yaml),
        ..Default::default()
    };
    SessionRequest::parse(wire, &rules(&options()))?.to_spec(&rules(&options()))
}

fn run_in(session: &SessionSpec, yaml: &str) -> Result<RunSpec, ApiError> {
    let wire = v1::StartRunRequest { policy: policy(yaml), ..wire() };
    RunRequest::parse(wire, false, &rules(&options()))?.to_spec(session, &rules(&options()))
}

fn field(error: ApiError) -> String {
    error.invalid_field().unwrap_or_else(|| panic!("{error:?}")).to_owned()
}

#[test]
fn impossible_policy_is_rejected_by_field() {
    for (yaml, expected) in [
        ("filesystem: {denied_paths: [opt]}", "policy.filesystem.denied_paths[0]"),
        ("filesystem: {read_only_paths: [/opt]}", "policy.filesystem.read_only_paths[0]"),
        ("isolation_level: LEVEL_0", "policy.isolation_level"),
        ("network: {mode: host}", "policy.network.mode"),
        ("resources: {max_memory_bytes: 99999999999}", "policy.resources.max_memory_bytes"),
    ] {
        assert_eq!(field(isolated_session(yaml).unwrap_err()), expected, "{yaml}");
    }
    assert_eq!(
        field(run_in(&session(), "process: {allow_fork: false}").unwrap_err()),
        "policy.process.allow_fork"
    );
}

/// Options of an installation whose operator set this network policy and default.
fn operator(network: &str, default_network: Option<NetworkMode>) -> Options {
    let policy =
        Policy::parse(&format!("network: {{{network}}}"), codelia_policy::Format::Yaml).unwrap();
    let policy = policy.as_installation();
    Options { policy, default_network, default_mode: Mode::Bwrap, ..options() }
}

fn session_with(
    options: &Options,
    network: Option<NetworkMode>,
    yaml: &str,
) -> Result<SessionSpec, ApiError> {
    let network = network.map_or(v1::NetworkMode::Unspecified, Into::into).into();
    let wire = v1::CreateSessionRequest { network, policy: policy(yaml), ..Default::default() };
    SessionRequest::parse(wire, &rules(options))?.to_spec(&rules(options))
}

fn run_with(
    options: &Options,
    session: &SessionSpec,
    network: Option<NetworkMode>,
    yaml: &str,
) -> Result<RunSpec, ApiError> {
    let network = network.map_or(v1::NetworkMode::Unspecified, Into::into).into();
    let wire = v1::StartRunRequest { network, policy: policy(yaml), ..wire() };
    RunRequest::parse(wire, false, &rules(options))?.to_spec(session, &rules(options))
}

const PROXY: Option<NetworkMode> = Some(NetworkMode::Proxy);
const HOST: Option<NetworkMode> = Some(NetworkMode::Host);
const NO_NETWORK: Option<NetworkMode> = Some(NetworkMode::None);

#[test]
fn policy_mode_takes_effect_without_request() {
    let network = |options: &Options, session, run| {
        let session = session_with(options, None, session).unwrap();
        run_with(options, &session, None, run).unwrap().network
    };
    let open = operator("", None);
    assert_eq!(network(&open, "", ""), NO_NETWORK, "nobody set a mode");
    let proxy = operator("mode: proxy, allowed_hosts: ['*']", None);
    assert_eq!(network(&proxy, "", ""), PROXY);
    assert_eq!(network(&proxy, "network: {mode: none}", ""), NO_NETWORK);
    assert_eq!(network(&proxy, "", "network: {mode: none}"), NO_NETWORK);
    let host = operator("mode: host", None);
    assert_eq!(network(&host, "", ""), NO_NETWORK, "host must be requested");
    assert_eq!(network(&host, "network: {mode: proxy}", ""), PROXY);
    let tight = operator("mode: proxy, allowed_hosts: ['*']", NO_NETWORK);
    assert_eq!(network(&tight, "", ""), NO_NETWORK, "the default is tighter");
    let default = operator("", PROXY);
    assert_eq!(network(&default, "", ""), PROXY);
    let capped = operator("mode: none", PROXY);
    assert_eq!(network(&capped, "", ""), NO_NETWORK, "the policy is tighter");
}

#[test]
fn run_request_tightens_its_session() {
    let options = operator("mode: proxy, allowed_hosts: ['*']", None);
    let session = session_with(&options, PROXY, "").unwrap();
    assert_eq!(run_with(&options, &session, None, "").unwrap().network, PROXY);
    assert_eq!(run_with(&options, &session, NO_NETWORK, "").unwrap().network, NO_NETWORK);
    assert_eq!(
        run_with(&options, &session, None, "network: {mode: none}").unwrap().network,
        NO_NETWORK
    );
    let cut = session_with(&options, NO_NETWORK, "").unwrap();
    assert_eq!(run_with(&options, &cut, None, "").unwrap().network, NO_NETWORK);
    assert_eq!(field(run_with(&options, &cut, PROXY, "").unwrap_err()), "network");
    let none = session_with(&options, None, "network: {mode: none}").unwrap();
    let refused = run_with(&options, &none, PROXY, "").unwrap_err();
    assert!(refused.text().contains("allows at most none"), "{}", refused.text());
    assert_eq!(field(refused), "network");
    assert_eq!(
        field(session_with(&operator("mode: none", None), PROXY, "").unwrap_err()),
        "network"
    );
    let refused = session_with(&operator("mode: none", None), None, "network: {mode: proxy}");
    assert_eq!(field(refused.unwrap_err()), "policy.network.mode");
}

fn needed_approval(run: &RunSpec, options: &Options) -> Option<ApprovalKind> {
    approval_needed(run, options, IsolationLevel::None).map(|need| need.grant.kind)
}

#[test]
fn approval_message_is_bounded_and_names_the_program() {
    let options = operator("", None);
    let session = session_with(&options, None, "").unwrap();
    let mut run = run_with(&options, &session, PROXY, "").unwrap();
    assert!(may_ask(&run));
    run.command = CommandSpec::new(["curl"]);
    let message = approval_needed(&run, &options, IsolationLevel::None).unwrap().message;
    assert_eq!(message, "\"curl\" requests the network through the egress proxy (mode bwrap)");
    run.command = CommandSpec::new(["\u{1}".repeat(5000)]);
    assert!(approval_needed(&run, &options, IsolationLevel::None).unwrap().message.len() < 1000);
}

#[test]
fn host_needs_operator_and_approval() {
    for mode in ["", "mode: none", "mode: proxy"] {
        let options = operator(mode, None);
        assert_eq!(field(session_with(&options, HOST, "").unwrap_err()), "network", "{mode}");
        let refused = session_with(&options, None, "network: {mode: host}").unwrap_err();
        assert_eq!(field(refused), "policy.network.mode", "{mode}");
    }
    let options = operator("mode: host", None);
    let session = session_with(&options, HOST, "").unwrap();
    let run = run_with(&options, &session, None, "").unwrap();
    assert_eq!(needed_approval(&run, &options), Some(ApprovalKind::NetworkHost));
    let run = run_with(&options, &session, PROXY, "").unwrap();
    assert_eq!((run.network, needed_approval(&run, &options)), (PROXY, None));
    assert_eq!(
        field(run_with(&options, &session, None, "network: {blocked_hosts: [a]}").unwrap_err()),
        "policy.network.blocked_hosts"
    );
}

#[test]
fn proxy_needs_approval_unless_operator_decided() {
    let open = operator("", None);
    let session = session_with(&open, None, "").unwrap();
    let run = run_with(&open, &session, PROXY, "network: {allowed_hosts: [a.example]}").unwrap();
    assert_eq!(needed_approval(&run, &open), Some(ApprovalKind::NetworkProxy));
    let session = session_with(&open, None, "network: {mode: proxy}").unwrap();
    let run = run_with(&open, &session, None, "").unwrap();
    assert_eq!(needed_approval(&run, &open), Some(ApprovalKind::NetworkProxy));
    let run = run_with(&open, &session, NO_NETWORK, "").unwrap();
    assert_eq!((run.network, needed_approval(&run, &open)), (NO_NETWORK, None));
    for decided in
        [operator("mode: proxy", None), operator("mode: host", None), operator("", PROXY)]
    {
        let session = session_with(&decided, None, "").unwrap();
        let run = run_with(&decided, &session, PROXY, "").unwrap();
        assert_eq!((run.network, needed_approval(&run, &decided)), (PROXY, None));
    }
    let logical = Options { default_mode: Mode::Logical, ..operator("", None) };
    let session = session_with(&logical, HOST, "").unwrap();
    let run = run_with(&logical, &session, HOST, "").unwrap();
    assert_eq!(needed_approval(&run, &logical), None, "mode logical has the host's network anyway");
}

#[test]
fn hosts_beyond_the_operators_are_rejected() {
    let options = operator("mode: proxy, allowed_hosts: ['set:pypi', 'api-*.example.com']", None);
    let session = session_with(&options, None, "").unwrap();
    let hosts = |yaml: &str| {
        run_with(&options, &session, None, yaml).map(|run| run.policy.network.allowed_hosts)
    };
    assert_eq!(
        hosts("network: {allowed_hosts: ['set:registries', '*-eu.example.com']}").unwrap().unwrap(),
        [
            "*.pypi.org",
            "api-*-eu.example.com",
            "api-eu.example.com",
            "files.pythonhosted.org",
            "pypi.org",
            "pypi.python.org"
        ]
    );
    assert_eq!(
        field(hosts("network: {allowed_hosts: [pypi.org, evil.example]}").unwrap_err()),
        "policy.network.allowed_hosts[1]"
    );
    let ports = run_with(&options, &session, None, "network: {allowed_ports: [22, 443]}").unwrap();
    assert_eq!(ports.policy.network.allowed_ports, Some(vec![443]));
    let refused = run_with(&options, &session, None, "network: {credentials: [npm]}").unwrap_err();
    assert_eq!(field(refused), "policy.network.credentials[0]");
}

#[test]
fn too_many_merged_patterns_are_rejected() {
    let list = |pattern: fn(usize) -> String| (0..60).map(pattern).collect::<Vec<_>>().join(", ");
    let starts = list(|n| format!("'a{n}x*.example.com'"));
    let ends = list(|n| format!("'*x{n}.example.com'"));
    let options = operator(&format!("mode: proxy, allowed_hosts: [{starts}]"), None);
    let refused = session_with(&options, None, &format!("network: {{allowed_hosts: [{ends}]}}"));
    assert_eq!(field(refused.unwrap_err()), "policy.network.allowed_hosts");
}

/// Every default network in every mode: a session and run that request nothing are admitted.
#[test]
fn default_network_never_fails_default_runs() {
    for mode in Mode::ALL {
        for (default, isolated) in [(None, NO_NETWORK), (NO_NETWORK, NO_NETWORK), (PROXY, PROXY)] {
            let options = Options { default_mode: mode, ..operator("", default) };
            let session = session_with(&options, None, "").unwrap();
            let run = run_with(&options, &session, None, "").unwrap();
            let expected = if mode == Mode::Logical { None } else { isolated };
            assert_eq!(run.network, expected, "{mode} {default:?}");
            assert_eq!(needed_approval(&run, &options), None, "{mode} {default:?}");
            let logical = v1::StartRunRequest { mode: v1::SandboxMode::Logical.into(), ..wire() };
            let logical = RunRequest::parse(logical, false, &rules(&options)).unwrap();
            assert_eq!(
                logical.to_spec(&session, &rules(&options)).unwrap().network,
                None,
                "{mode}"
            );
        }
    }
}

#[test]
fn run_can_only_tighten_session_policy() {
    let session =
        isolated_session("process: {allow_fork: false}\nresources: {max_memory_bytes: 1000}")
            .unwrap();
    assert_eq!(session.limits.memory_bytes, 1000);
    let wide = "process: {allow_fork: true, debug: true, allow_exec: false}\nresources: {max_memory_bytes: 2000}";
    let run = run_in(&session, wide).unwrap();
    let process = run.policy.process;
    assert_eq!(
        (process.allow_fork, process.debug, process.allow_exec),
        (Some(false), Some(false), Some(false))
    );
    assert_eq!((run.limits.memory_bytes, run.requested_limits.memory_bytes), (1000, Some(1000)));
}

#[test]
fn limit_above_policy_is_rejected_by_field() {
    let session = isolated_session("resources: {max_memory_bytes: 1000}").unwrap();
    let limits = v1::Limits { memory_bytes: Some(1001), ..Default::default() };
    let request = RunRequest::parse(
        v1::StartRunRequest { limits: Some(limits), ..wire() },
        false,
        &rules(&options()),
    )
    .unwrap();
    assert_eq!(
        field(request.to_spec(&session, &rules(&options())).unwrap_err()),
        "limits.memory_bytes"
    );
}

#[test]
fn forbidden_command_or_variable_is_rejected() {
    let session = isolated_session("command: {allowed_patterns: ['^make( |$)']}").unwrap();
    let error = run_in(&session, "").unwrap_err();
    assert_eq!(error.reason(), Reason::CommandNotAllowed);
    assert_eq!(error.named("rule"), Some("policy.command.allowed_patterns"));
    let session = isolated_session("environment: {mode: explicit, names: [CI]}").unwrap();
    let mut wire = wire();
    wire.command.as_mut().unwrap().env = [("SECRET".to_owned(), String::new())].into();
    let request = RunRequest::parse(wire, false, &rules(&options())).unwrap();
    assert_eq!(field(request.to_spec(&session, &rules(&options())).unwrap_err()), "command.env");
    let mut wire = self::wire();
    wire.command.as_mut().unwrap().secret_env = [("SECRET".to_owned(), String::new())].into();
    let request = RunRequest::parse(wire, false, &rules(&options())).unwrap();
    assert_eq!(
        field(request.to_spec(&session, &rules(&options())).unwrap_err()),
        "command.secret_env"
    );
}

/// A tool that runs `true`, with this policy.
fn tool(yaml: &str) -> Tool {
    let policy = Policy::parse(yaml, codelia_policy::Format::Yaml).unwrap();
    let declaration = ToolDeclaration {
        owner: "me".into(),
        executables: vec!["true".into()],
        policy,
        ..ToolDeclaration::default()
    };
    Tool {
        tenant: "a".parse().unwrap(),
        id: "tool".parse().unwrap(),
        version: 3,
        declaration,
        key: KeyId::generate(),
        created_at: OffsetDateTime::UNIX_EPOCH,
        updated_at: OffsetDateTime::UNIX_EPOCH,
        approval: None,
        quarantine: None,
    }
}

fn approved(yaml: &str) -> Tool {
    let approval = ToolApproval {
        reason: "ok".into(),
        key: KeyId::generate(),
        at: OffsetDateTime::UNIX_EPOCH,
    };
    Tool { approval: Some(approval), ..tool(yaml) }
}

/// A run with this tool in a session, under the highest floor.
fn run_of(tool: &Tool, session: &SessionSpec, mode: Option<Mode>) -> Result<RunSpec, ApiError> {
    let options = options();
    let rules = Rules { floor: IsolationLevel::Full, ..rules(&options) };
    let mode = mode.map_or(v1::SandboxMode::Unspecified, Into::into).into();
    let wire = v1::StartRunRequest { tool: "tools/tool".into(), mode, ..wire() };
    let mut request = RunRequest::parse(wire, false, &rules).unwrap();
    assert_eq!(request.tool, Some(tool.id.clone()));
    request.declared = Some(Arc::new(tool.clone()));
    request.to_spec(session, &rules)
}

#[test]
fn tool_tightens_the_session() {
    let session = isolated_session("resources: {max_memory_bytes: 2000}").unwrap();
    let run = run_of(&tool("resources: {max_memory_bytes: 1000}"), &session, None).unwrap();
    assert_eq!((run.limits.memory_bytes, run.level()), (1000, IsolationLevel::Full));
    let named = run.tool.unwrap();
    assert_eq!((named.id.as_str(), named.version), ("tool", 3));
    let run = run_of(&tool("resources: {max_memory_bytes: 3000}"), &session, None).unwrap();
    assert_eq!(run.limits.memory_bytes, 2000, "a tool never widens");
    let refused =
        run_of(&tool("filesystem: {read_only_paths: [/srv]}"), &session, None).unwrap_err();
    assert_eq!(field(refused), "tool.policy.filesystem.read_only_paths[0]");
    let mut other = tool("");
    other.declaration.executables = vec!["false".into()];
    assert_eq!(field(run_of(&other, &session, None).unwrap_err()), "tool");
}

#[test]
fn quarantined_or_unapproved_tool_is_refused() {
    let session = isolated_session("").unwrap();
    let quarantine = ToolQuarantine {
        reason: "it wrote elsewhere".into(),
        key: None,
        run: None,
        at: OffsetDateTime::UNIX_EPOCH,
    };
    let bad = Tool { quarantine: Some(quarantine), ..approved("isolation_level: LEVEL_0") };
    let refused = run_of(&bad, &session, None).unwrap_err();
    assert_eq!(refused.reason(), Reason::ToolQuarantined);
    assert!(
        refused.text().contains("it wrote elsewhere")
            && refused.text().contains("codelia tools release")
    );
    for level in ["LEVEL_0", "LEVEL_1"] {
        let refused =
            run_of(&tool(&format!("isolation_level: {level}")), &session, None).unwrap_err();
        assert_eq!(refused.reason(), Reason::ToolNotApproved);
        assert!(refused.text().contains("version 3"), "{refused:?}");
    }
}

#[test]
fn approved_level_lowers_the_floor_for_its_tool_only() {
    let session = isolated_session("").unwrap();
    let none = run_of(&approved("isolation_level: LEVEL_0"), &session, None).unwrap();
    assert_eq!((none.mode, none.level()), (Mode::Logical, IsolationLevel::None));
    let process = run_of(&approved("isolation_level: LEVEL_1"), &session, None).unwrap();
    assert_eq!((process.mode, process.level()), (session.mode, IsolationLevel::Process));
    // A tool without a level has the highest, in a session without isolation too.
    let mut unisolated = session.clone();
    unisolated.mode = Mode::Logical;
    let refused = run_of(&tool(""), &unisolated, None).unwrap_err();
    assert_eq!(refused.reason(), Reason::IsolationFloor);
    // What the session or a flag requires is kept.
    let strict = isolated_session("isolation_level: LEVEL_2").unwrap();
    let run = run_of(&approved("isolation_level: LEVEL_1"), &strict, None).unwrap();
    assert_eq!(run.level(), IsolationLevel::Full);
    let mut flagged = session.clone();
    flagged.flags.floor = Some(IsolationLevel::Full);
    let run = run_of(&approved("isolation_level: LEVEL_1"), &flagged, None).unwrap();
    assert_eq!(run.level(), IsolationLevel::Full);
    assert!(run_of(&approved("isolation_level: LEVEL_0"), &flagged, None).is_err());
}

#[test]
fn tool_without_level_is_not_run_without_isolation() {
    let options = options();
    let mut request = RunRequest::parse(
        v1::StartRunRequest { tool: "tool".into(), ..wire() },
        false,
        &rules(&options),
    )
    .unwrap();
    request.declared = Some(Arc::new(tool("")));
    let refused = request.to_spec(&session(), &rules(&options)).unwrap_err();
    assert_eq!(
        field(refused),
        "tool.policy.isolation_level",
        "although the tenant's floor allows it"
    );
}
