//! Plans of modes and policies.

use codelia_types::CommandSpec;

use super::*;
use crate::{FilesystemMode, LimitsRequest, SyscallMode, syscalls};

fn spec(requested_limits: LimitsRequest, network: Option<NetworkMode>) -> RunSpec {
    let run = RunSpec::new(CommandSpec::new(["true"]), Mode::Logical);
    RunSpec { network, requested_limits, ..run }
}

fn target() -> PlanTarget {
    PlanTarget { sandbox: RunId::generate(), session: SessionId::generate(), root: "/s".into() }
}

fn plan(spec: &RunSpec, host: Enforceable) -> Result<Plan, PlanError> {
    Plan::logical(target(), spec, host)
}

#[test]
fn unenforceable_requested_limit_is_refused() {
    let requested = LimitsRequest { memory_bytes: Some(1), ..Default::default() };
    let error = plan(&spec(requested, None), Enforceable::default()).unwrap_err();
    assert_eq!(error.field, "limits.memory_bytes");
}

#[test]
fn unenforceable_default_limit_is_listed() {
    let plan = plan(&spec(LimitsRequest::default(), None), Enforceable::default()).unwrap();
    assert_eq!(plan.unenforced, [Limit::MemoryBytes, Limit::CpuMillicores, Limit::Pids]);
}

#[test]
fn logical_mode_refuses_unenforceable_network() {
    let error =
        plan(&spec(LimitsRequest::default(), Some(NetworkMode::None)), Enforceable::default());
    assert_eq!(error.unwrap_err().field, "network");
}

fn isolated(
    policy: Policy,
    network: Option<NetworkMode>,
    host: &HostInfo,
) -> Result<Plan, PlanError> {
    let spec = RunSpec { mode: Mode::Bwrap, policy, ..spec(LimitsRequest::default(), network) };
    let ids = Ids { uid: 200_000, gid: 200_000 };
    Plan::isolated(target(), &spec, host, ids)
}

#[test]
fn transaction_is_refused_unless_all_changes_can_be_dropped() {
    let check = |mode, policy: &str| {
        let policy = Policy::parse(policy, crate::Format::Yaml).unwrap();
        Plan::check_transaction(mode, &policy).map_err(|error| error.to_string())
    };
    for mode in [Mode::Bwrap, Mode::Nsjail] {
        assert_eq!(
            check(mode, "filesystem: {read_only_paths: [/opt], denied_paths: [/workspace/x]}"),
            Ok(())
        );
        for paths in ["read_write_paths", "overlay_paths"] {
            let error = check(mode, &format!("filesystem: {{{paths}: [/opt]}}")).unwrap_err();
            assert!(error.contains("transaction") && error.contains(paths), "{error}");
        }
    }
    for mode in [Mode::Logical, Mode::Container] {
        let error = check(mode, "{}").unwrap_err();
        assert!(
            error.contains("transaction") && error.contains("use mode native, bwrap or nsjail"),
            "{error}"
        );
    }
    let mut host = HostInfo::fully_capable();
    host.enforceable.overlays = false;
    let spec = RunSpec {
        mode: Mode::Bwrap,
        transaction: Some(codelia_types::TransactionMode::Apply),
        ..spec(LimitsRequest::default(), None)
    };
    let ids = Ids { uid: 200_000, gid: 200_000 };
    assert_eq!(Plan::isolated(target(), &spec, &host, ids).unwrap_err().field, "transaction");
}

#[test]
fn transaction_replaces_only_the_workspace() {
    let plan = isolated(Policy::default(), None, &HostInfo::fully_capable()).unwrap();
    let changed = plan.clone().with_transaction(Path::new("/layer"));
    let differing: Vec<_> = plan
        .mounts
        .iter()
        .zip(&changed.mounts)
        .filter(|(old, new)| old != new)
        .map(|(_, new)| new)
        .collect();
    let (source, target, layer) = ("/s".into(), WORKSPACE.into(), "/layer".into());
    assert_eq!(differing, [&Mount::Transaction { source, target, layer }]);
}

#[test]
fn only_workspace_is_writable_by_default() {
    let plan = isolated(Policy::default(), None, &HostInfo::fully_capable()).unwrap();
    let writable: Vec<_> = plan
        .mounts
        .iter()
        .filter(|mount| matches!(mount, Mount::Bind { writable: true, .. }))
        .collect();
    let workspace = Mount::Bind { source: "/s".into(), target: WORKSPACE.into(), writable: true };
    assert_eq!(writable, [&workspace]);
    assert_eq!(plan.network, NetworkMode::None);
    assert!(plan.unenforced.is_empty());
}

#[test]
fn isolating_mode_refuses_unenforceable_defaults() {
    let mut host = HostInfo::fully_capable();
    (host.enforceable.memory, host.enforceable.watches) = (false, false);
    let error = isolated(Policy::default(), None, &host).unwrap_err();
    assert_eq!(error.field, "limits.memory_bytes");
    let message = error.to_string();
    assert!(message.contains("delegated cgroup") && message.contains("best_effort"), "{message}");
    let mut host = HostInfo::fully_capable();
    host.enforceable.executables = false;
    let mut policy = Policy::default();
    assert!(isolated(policy.clone(), None, &host).is_ok());
    policy.process.allowed_executables = Some(vec!["/usr/bin/git".into()]);
    assert_eq!(
        isolated(policy, None, &host).unwrap_err().field,
        "policy.process.allowed_executables"
    );
}

#[test]
fn best_effort_watches_what_it_cannot_enforce() {
    let mut host = HostInfo::fully_capable();
    let exact = isolated(Policy::default(), None, &host).unwrap();
    assert!(exact.watched.is_empty() && exact.unenforced.is_empty(), "{exact:?}");
    (host.enforceable.memory, host.enforceable.cpu, host.enforceable.pids) = (false, false, false);
    let plan = isolated(Policy::default(), None, &host).unwrap();
    assert_eq!(plan.watched, [Limit::MemoryBytes, Limit::Pids, Limit::CpuTime]);
    assert_eq!(plan.unenforced, [Limit::CpuMillicores]);
    let requested = LimitsRequest { cpu_millicores: Some(500), ..Default::default() };
    let spec = RunSpec { mode: Mode::Bwrap, ..spec(requested, None) };
    let ids = Ids { uid: 200_000, gid: 200_000 };
    let error = Plan::isolated(target(), &spec, &host, ids).unwrap_err();
    assert_eq!(error.field, "limits.cpu_millicores");
    assert!(!error.to_string().contains("best_effort"), "{error}");
}

fn network_policy(yaml: &str) -> Policy {
    Policy::parse(&format!("network: {yaml}"), crate::Format::Yaml).unwrap()
}

#[test]
fn network_is_tightest_of_policy_and_request() {
    for requested in
        [None, Some(NetworkMode::None), Some(NetworkMode::Proxy), Some(NetworkMode::Host)]
    {
        for mode in ["", "mode: none", "mode: proxy", "mode: host"] {
            let policy = network_policy(&format!("{{{mode}}}"));
            let expected = policy.network.effective_mode(requested);
            let plan = isolated(policy, requested, &HostInfo::fully_capable()).unwrap();
            assert_eq!(plan.network, expected, "{requested:?} {mode:?}");
        }
    }
}

#[test]
fn host_without_egress_refuses_proxy_with_remedy() {
    let mut host = HostInfo::fully_capable();
    host.enforceable.egress = false;
    let proxy = || network_policy("{mode: proxy}");
    let error = isolated(proxy(), Some(NetworkMode::Proxy), &host).unwrap_err();
    assert_eq!(error.field, "network");
    assert!(error.to_string().contains("IPv6"), "{error}");
    assert_eq!(isolated(proxy(), None, &host).unwrap_err().field, "policy.network.mode");
    for mode in [NetworkMode::None, NetworkMode::Host] {
        assert!(isolated(network_policy("{mode: host}"), Some(mode), &host).is_ok(), "{mode}");
    }
}

#[test]
fn proxy_alone_has_rules_variables_and_resolver() {
    let host = HostInfo::fully_capable();
    let plan = |mode| isolated(network_policy("{mode: host}"), Some(mode), &host).unwrap();
    let resolver = |plan: &Plan| {
        let is_own = |mount: &&Mount| matches!(mount, Mount::File { .. } | Mount::Runtime { .. });
        let names = plan.mounts.iter().filter(is_own).map(|mount| mount.target().to_owned());
        names.filter(|name| name.ends_with("resolv.conf")).count()
    };
    let proxy = plan(NetworkMode::Proxy);
    assert_eq!(proxy.egress.as_ref().unwrap().allowed_ports, [80, 443]);
    for (name, value) in
        [("HTTPS_PROXY", "http://127.0.0.1:3128"), ("no_proxy", "localhost,127.0.0.1,::1")]
    {
        assert_eq!(proxy.env[name], value);
    }
    assert_eq!(resolver(&proxy), 1);
    let nsswitch = proxy.mounts.iter().filter(|mount| mount.target().ends_with("nsswitch.conf"));
    assert_eq!(nsswitch.count(), 1, "the host's is replaced");
    for mode in [NetworkMode::None, NetworkMode::Host] {
        let other = plan(mode);
        assert!(other.egress.is_none() && !other.env.contains_key("HTTPS_PROXY"), "{mode}");
        assert_eq!(resolver(&other), usize::from(mode == NetworkMode::Host), "{mode}");
    }
}

#[test]
fn host_network_refuses_what_only_the_proxy_enforces() {
    let policy = network_policy("{mode: host, blocked_hosts: [a.example]}");
    let plan = |network| isolated(policy.clone(), Some(network), &HostInfo::fully_capable());
    assert_eq!(plan(NetworkMode::Proxy).unwrap().network, NetworkMode::Proxy);
    let error = plan(NetworkMode::Host).unwrap_err();
    assert_eq!(error.field, "policy.network.blocked_hosts");
    assert!(error.to_string().contains("use network mode proxy"), "{error}");
}

#[test]
fn logical_mode_refuses_every_network_rule() {
    for (yaml, expected) in [
        ("{mode: none}", "policy.network.mode"),
        ("{mode: proxy}", "policy.network.mode"),
        ("{allowed_hosts: []}", "policy.network.allowed_hosts"),
        ("{ask_hosts: []}", "policy.network.ask_hosts"),
        ("{blocked_hosts: [a]}", "policy.network.blocked_hosts"),
        ("{allowed_ports: []}", "policy.network.allowed_ports"),
        ("{max_connections: 1}", "policy.network.max_connections"),
        ("{max_connections_per_second: 1}", "policy.network.max_connections_per_second"),
        ("{max_sent_bytes: 1}", "policy.network.max_sent_bytes"),
        ("{max_received_bytes: 1}", "policy.network.max_received_bytes"),
        ("{idle_timeout: 1s}", "policy.network.idle_timeout"),
        ("{credentials: [a]}", "policy.network.credentials"),
        ("{executables: [/bin/a]}", "policy.network.executables"),
    ] {
        let error = Plan::check(Mode::Logical, None, &network_policy(yaml)).unwrap_err();
        assert_eq!(error.field, expected, "{yaml}");
        assert!(error.remedy.is_some(), "{yaml}");
    }
    for network in [NetworkMode::None, NetworkMode::Proxy] {
        let error = Plan::check(Mode::Logical, Some(network), &Policy::default()).unwrap_err();
        assert_eq!(error.field, "network");
    }
    assert!(Plan::check(Mode::Logical, Some(NetworkMode::Host), &Policy::default()).is_ok());
    assert!(Plan::check(Mode::Logical, None, &Policy::default().with_defaults()).is_ok());
}

#[test]
fn network_by_executable_is_refused_in_every_mode() {
    let policy = network_policy("{mode: proxy, executables: [/usr/bin/git]}");
    for mode in [Mode::Bwrap, Mode::Nsjail, Mode::Container] {
        let error = Plan::check(mode, None, &policy).unwrap_err();
        assert_eq!(error.field, "policy.network.executables");
        assert!(error.to_string().contains("runs of their own"), "{error}");
    }
    let in_logical = network_policy("{executables: [/usr/bin/git]}");
    let error = Plan::check(Mode::Logical, None, &in_logical).unwrap_err();
    assert_eq!(error.field, "policy.network.executables");
    assert!(
        error.to_string().contains("use mode native"),
        "only isolating modes have `none`: {error}"
    );
    let error = isolated(policy, None, &HostInfo::fully_capable()).unwrap_err();
    assert_eq!(error.field, "policy.network.executables");
}

#[test]
fn denied_paths_are_hidden_last() {
    let mut policy = Policy::default();
    policy.filesystem.read_only_paths =
        Some(vec!["/opt/a/b".into(), "/opt".into(), "/srv/no/x".into()]);
    policy.filesystem.denied_paths = vec!["/srv/no".into(), "/opt/secret".into()];
    let plan = isolated(policy, None, &HostInfo::fully_capable()).unwrap();
    let tail: Vec<_> = plan.mounts.iter().rev().take(4).rev().map(Mount::target).collect();
    let expected = ["/opt", "/opt/a/b", "/srv/no", "/opt/secret"].map(Path::new);
    assert_eq!(tail, expected);
}

#[test]
fn overlay_layer_is_next_to_session() {
    let mut policy = Policy::default();
    policy.filesystem.read_only_paths = Some(vec!["/opt".into()]);
    policy.filesystem.overlay_paths = Some(vec!["/opt/a/b".into(), "/bin/x".into()]);
    let mut host = HostInfo::fully_capable();
    host.runtime.homes = vec!["/opt/a/b".into()];
    let plan = isolated(policy, None, &host).unwrap();
    let overlay = |path: &str, layer: &str| Mount::Overlay {
        source: path.into(),
        target: path.into(),
        layer: Path::new("/s.overlays").join(layer),
    };
    let opened = plan.mounts.iter().skip_while(|mount| mount.target() != Path::new("/opt"));
    assert_eq!(
        opened.take(4).cloned().collect::<Vec<_>>(),
        [
            Mount::Bind { source: "/opt".into(), target: "/opt".into(), writable: false },
            overlay("/opt/a/b", "%2Fopt%2Fa%2Fb"),
            overlay("/usr/bin/x", "%2Fusr%2Fbin%2Fx"),
            Mount::Hidden { target: "/opt/a/b/.aws".into(), even_if_absent: false },
        ]
    );
}

#[test]
fn overlay_never_exposes_sessions() {
    for path in ["/s", "/s/below"] {
        let mut policy = Policy::default();
        policy.filesystem.overlay_paths = Some(vec![path.into()]);
        assert_eq!(
            isolated(policy, None, &HostInfo::fully_capable()).unwrap_err().field,
            OVERLAY_PATHS,
            "{path}"
        );
    }
}

#[test]
fn denied_path_behind_symlink_is_hidden() {
    let mut policy = Policy::default();
    policy.filesystem.denied_paths = vec!["/bin/sh".into(), "/sbin".into()];
    let plan = isolated(policy, None, &HostInfo::fully_capable()).unwrap();
    let hidden: Vec<_> =
        plan.mounts.iter().filter(|mount| matches!(mount, Mount::Hidden { .. })).collect();
    assert_eq!(
        hidden.iter().map(|mount| mount.target()).collect::<Vec<_>>(),
        ["/usr/bin/sh", "/usr/sbin"].map(Path::new)
    );
}

#[test]
fn dynamic_mode_asks_for_what_the_policy_opens() {
    let mut policy = Policy::default();
    policy.filesystem.mode = Some(FilesystemMode::Dynamic);
    policy.filesystem.read_only_paths = Some(vec!["/opt".into(), "/srv/a".into()]);
    let host = HostInfo::fully_capable();
    let asked = |plan: Plan| plan.security.unwrap().asked_reads;
    let plan = isolated(policy.clone(), None, &host).unwrap();
    assert!(asked(plan).contains(&PathBuf::from("/opt")));
    policy.filesystem.read_only_paths = Some(vec!["/usr/share/doc".into()]);
    let error = isolated(policy.clone(), None, &host).unwrap_err();
    assert_eq!(error.field, READ_ONLY_PATHS);
    assert!(error.to_string().contains("such as /usr"), "{error}");
    policy.filesystem.mode = None;
    assert!(asked(isolated(policy.clone(), None, &host).unwrap()).is_empty());
    policy.filesystem.mode = Some(FilesystemMode::Dynamic);
    for (mode, can_ask) in [(Mode::Container, true), (Mode::Bwrap, false)] {
        let host = Enforceable { asked_reads: can_ask, ..Enforceable::EVERYTHING };
        assert_eq!(check::unenforceable_field(mode, &policy, host), Some("policy.filesystem.mode"));
    }
    assert_eq!(Plan::check(Mode::Logical, None, &policy).unwrap_err().field, READ_ONLY_PATHS);
}

#[test]
fn policy_narrows_syscalls() {
    let mut policy = Policy::default();
    policy.syscalls.mode = Some(SyscallMode::Deny);
    policy.syscalls.names = vec!["socket".to_owned()];
    let security = isolated(policy, None, &HostInfo::fully_capable()).unwrap().security.unwrap();
    let SyscallRules::Allow(names) = security.syscalls else { panic!("expected an allow-list") };
    assert_eq!(names.len(), syscalls::allowed(false).len() - 1);
    assert!(!names.contains(&"socket".to_owned()));
}

#[test]
fn logical_mode_refuses_unenforceable_policy() {
    let mut spec = spec(LimitsRequest::default(), None);
    spec.policy.process.allow_fork = Some(false);
    assert_eq!(plan(&spec, Enforceable::default()).unwrap_err().field, "policy.process.allow_fork");
}
