use codelia_policy::{Ceilings, Limits};

use super::*;
use crate::options::{CallLimits, Timeouts};

pub(crate) fn options() -> Options {
    Options {
        listen: ([127, 0, 0, 1], 0).into(),
        tls: None,
        internal_tls: None,
        defaults: Limits::default(),
        ceilings: Ceilings::default(),
        timeouts: Timeouts::default(),
        policy: Policy::installation(),
        default_mode: Mode::Logical,
        default_network: Some(NetworkMode::None),
        session_ttl: Duration::from_secs(60),
        max_session_ttl: Duration::from_secs(600),
        allow_logical: true,
        unisolated_tenant: None,
        shutdown_grace: Duration::from_secs(1),
        secret_key: None,
        connections: codelia_server::Limits::default(),
        calls: CallLimits::default(),
        cors_origins: crate::CorsOrigins::None,
        access_log: false,
        retention: codelia_store::Retention::default(),
    }
}

fn rules(options: &Options) -> Rules<'_> {
    Rules { options, ceilings: options.ceilings.clone(), floor: IsolationLevel::None }
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
    }
}

#[test]
fn limits_come_from_run_then_session_then_defaults() {
    let limits = v1::Limits { pids: Some(3), ..Default::default() };
    let request =
        RunRequest::parse(v1::StartRunRequest { limits: Some(limits), ..wire() }, false, &rules(&options()))
            .unwrap();
    let spec = request.to_spec(&session(), &rules(&options())).unwrap();
    assert_eq!((spec.limits.pids, spec.limits.open_files), (3, 9));
    assert_eq!(spec.limits.memory_bytes, Limits::default().memory_bytes);
    assert_eq!((spec.requested_limits.pids, spec.requested_limits.memory_bytes), (Some(3), None));
}

#[test]
fn limit_above_ceiling_is_rejected_by_field() {
    let limits = v1::Limits { cpu_millicores: Some(i64::MAX), ..Default::default() };
    let request =
        RunRequest::parse(v1::StartRunRequest { limits: Some(limits), ..wire() }, false, &rules(&options()))
            .unwrap();
    let error = request.to_spec(&session(), &rules(&options())).unwrap_err();
    assert!(matches!(error, ApiError::InvalidField { field, .. } if field == "limits.cpu_millicores"));
}

#[test]
fn default_network_does_not_apply_to_logical() {
    let request = RunRequest::parse(wire(), false, &rules(&options())).unwrap();
    assert_eq!(request.to_spec(&session(), &rules(&options())).unwrap().network, None);
    let isolated = SessionSpec { mode: Mode::Bwrap, ..session() };
    assert_eq!(request.to_spec(&isolated, &rules(&options())).unwrap().network, Some(NetworkMode::None));
}

#[test]
fn logical_is_rejected_where_not_allowed() {
    let strict = Options { allow_logical: false, ..options() };
    let request = RunRequest::parse(wire(), false, &rules(&options())).unwrap();
    let expected = ApiError::ModeNotAllowed { mode: Mode::Logical };
    assert_eq!(request.to_spec(&session(), &rules(&strict)).unwrap_err(), expected);
    let request = SessionRequest::parse(v1::CreateSessionRequest::default(), &rules(&strict)).unwrap();
    assert_eq!(request.to_spec(&rules(&strict)).unwrap_err(), expected);
}

#[test]
fn mode_below_isolation_floor_is_rejected() {
    let below = ApiError::BelowFloor { mode: Mode::Logical, floor: IsolationLevel::Process };
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
fn fingerprint_ignores_order_of_maps() {
    let with_labels = |labels: &[&str]| {
        let labels = labels.iter().map(|&key| (key.to_owned(), String::new())).collect();
        fingerprint(
            &RunRequest::parse(v1::StartRunRequest { labels, ..wire() }, false, &rules(&options())).unwrap(),
        )
        .unwrap()
    };
    assert_eq!(with_labels(&["a", "b", "c"]), with_labels(&["c", "b", "a"]));
    assert_ne!(with_labels(&["a", "b"]), with_labels(&["a", "c"]));
}

#[test]
fn fingerprint_ignores_session_name_and_key() {
    let other = v1::StartRunRequest { parent: "sessions/b".into(), idempotency_key: "k".into(), ..wire() };
    let hash = |wire| fingerprint(&RunRequest::parse(wire, false, &rules(&options())).unwrap()).unwrap();
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
    assert_eq!(secret.secret_key(&options()).unwrap_err(), ApiError::NoSecretKey);
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
    match error {
        ApiError::InvalidField { field, .. } => field,
        other => panic!("{other:?}"),
    }
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

#[test]
fn unsupported_network_is_rejected_at_admission() {
    for network in [v1::NetworkMode::Proxy, v1::NetworkMode::Host] {
        let wire = v1::CreateSessionRequest {
            mode: v1::SandboxMode::Bwrap.into(),
            network: network.into(),
            ..Default::default()
        };
        let request = SessionRequest::parse(wire, &rules(&options())).unwrap();
        assert_eq!(field(request.to_spec(&rules(&options())).unwrap_err()), "network");
    }
}

#[test]
fn run_can_only_tighten_session_policy() {
    let session =
        isolated_session("process: {allow_fork: false}\nresources: {max_memory_bytes: 1000}").unwrap();
    assert_eq!(session.limits.memory_bytes, 1000);
    let wide =
        "process: {allow_fork: true, debug: true, allow_exec: false}\nresources: {max_memory_bytes: 2000}";
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
    let request =
        RunRequest::parse(v1::StartRunRequest { limits: Some(limits), ..wire() }, false, &rules(&options()))
            .unwrap();
    assert_eq!(field(request.to_spec(&session, &rules(&options())).unwrap_err()), "limits.memory_bytes");
}

#[test]
fn forbidden_command_or_variable_is_rejected() {
    let session = isolated_session("command: {allowed_patterns: ['^make( |$)']}").unwrap();
    let error = run_in(&session, "").unwrap_err();
    assert!(matches!(error, ApiError::CommandNotAllowed { rule, .. } if rule == "command.allowed_patterns"));
    let session = isolated_session("environment: {mode: explicit, names: [CI]}").unwrap();
    let mut wire = wire();
    wire.command.as_mut().unwrap().env = [("SECRET".to_owned(), String::new())].into();
    let request = RunRequest::parse(wire, false, &rules(&options())).unwrap();
    assert_eq!(field(request.to_spec(&session, &rules(&options())).unwrap_err()), "command.env");
    let mut wire = self::wire();
    wire.command.as_mut().unwrap().secret_env = [("SECRET".to_owned(), String::new())].into();
    let request = RunRequest::parse(wire, false, &rules(&options())).unwrap();
    assert_eq!(field(request.to_spec(&session, &rules(&options())).unwrap_err()), "command.secret_env");
}
