//! A plan: a policy made concrete for one sandbox.
//!
//! A plan is plain data. A backend carries it out completely or refuses it.

mod check;
mod host;
mod io;
mod security;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use codelia_types::{Mode, NetworkMode, RunId, SessionId};
use serde::{Deserialize, Serialize};

use self::check::{
    OVERLAY_PATHS, READ_ONLY_PATHS, check_logical, check_logical_network, check_transaction,
    isolated_network, remedy, unenforceable_field, unenforced_limits, unwatchable_limits, watched_limits,
};
use crate::{
    EgressRules, Layout, Limit, Limits, Mount, Policy, RunSpec, WORKSPACE, egress,
    mounts::{self, mounts},
};

pub(crate) use self::security::DEFAULT_VIOLATION_LIMIT;
pub use self::{
    check::{egress_remedy, limits_remedy},
    host::{Enforceable, HostInfo},
    io::IoLimits,
    security::{LoggedCalls, Security, SyscallRules},
};

/// The host name inside a sandbox.
const HOSTNAME: &str = "codelia";

/// Everything that a backend must set up for a command.
///
/// A plan is made from an admitted run ([`RunSpec`]) and from what the host can enforce:
///
/// ```
/// use codelia_policy::{
///     Format, HostInfo, Ids, Limits, LimitsRequest, Mount, Plan, PlanTarget, Policy, RunSpec,
/// };
/// use codelia_types::{CommandSpec, Mode, NetworkMode, RunId, SessionId};
///
/// // A policy that shows the host's /opt, except for one directory.
/// let policy = Policy::parse(
///     "filesystem: {read_only_paths: [/opt], denied_paths: [/opt/secret]}",
///     Format::Yaml,
/// )?;
/// let spec = RunSpec {
///     command: CommandSpec::new(["ls", "/opt"]),
///     mode: Mode::Bwrap,
///     network: None,
///     limits: Limits::default(),
///     requested_limits: LimitsRequest::default(),
///     policy,
///     ends_with_caller: false,
///     tool: None,
///     transaction: None,
/// };
///
/// let target = PlanTarget {
///     sandbox: RunId::generate(),
///     session: SessionId::generate(),
///     root: "/srv/sessions/dev".into(),
/// };
/// let ids = Ids { uid: 200_000, gid: 200_000 };
/// let plan = Plan::isolated(target, &spec, &HostInfo::fully_capable(), ids)?;
///
/// assert_eq!(plan.network, NetworkMode::None);
/// // Later mounts cover earlier ones, so the denied path comes last.
/// let last = plan.mounts.last().map(Mount::target);
/// assert_eq!(last, Some("/opt/secret".as_ref()));
///
/// // A host that cannot enforce the plan refuses it and names the field.
/// let mut weak = HostInfo::fully_capable();
/// weak.enforceable.memory = false;
/// weak.enforceable.watches = false;
/// let target = PlanTarget {
///     sandbox: RunId::generate(),
///     session: SessionId::generate(),
///     root: "/srv/sessions/dev".into(),
/// };
/// let error = Plan::isolated(target, &spec, &weak, ids).unwrap_err();
/// assert_eq!(error.field, "limits.memory_bytes");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The sandbox's id, which cgroups, sockets and containers carry. Usually the run's id.
    pub sandbox: RunId,
    /// The session that the sandbox belongs to.
    pub session: SessionId,
    /// The mode, and so the backend that carries out the plan.
    pub mode: Mode,
    /// The session's directory on the host, the only host directory that is writable by default.
    pub root: PathBuf,
    /// The path of that directory inside the sandbox. In mode `logical` the same path.
    pub workspace: PathBuf,
    /// Mounts, in the order in which they are made. Empty in mode `logical`.
    pub mounts: Vec<Mount>,
    /// What is changed in the mounts of the workspace once they are made. `None` changes nothing.
    #[serde(default)]
    pub layout: Option<Layout>,
    /// The host ids of the command. `None` keeps the worker's own ids (mode `logical`).
    pub ids: Option<Ids>,
    /// The complete environment of the command, before its own variables are added.
    pub env: BTreeMap<String, String>,
    /// Host name inside the sandbox. `None` keeps the host's (mode `logical`).
    pub hostname: Option<String>,
    /// The limits to enforce.
    pub limits: Limits,
    /// Limits that the host cannot enforce. Empty except in mode `logical` and with best effort.
    pub unenforced: Vec<Limit>,
    /// Limits that are only watched: the worker ends the command after it exceeded one. Empty
    /// except with best effort.
    pub watched: Vec<Limit>,
    /// Rate limits for the session's device.
    pub io: IoLimits,
    /// The only processors that the command runs on, by the host's numbers. `None` allows all.
    pub cpus: Option<Vec<u32>>,
    /// The profile that names the container image. `None` means the worker's default image.
    pub profile: Option<String>,
    /// The network that the command can reach.
    pub network: NetworkMode,
    /// What it may reach through the egress proxy. `None` in every other network mode. The proxy
    /// enforces it, so that a sandbox serves any rules.
    pub egress: Option<EgressRules>,
    /// What the kernel enforces. `None` only in mode `logical`.
    pub security: Option<Security>,
}

/// The sandbox that a plan is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanTarget {
    /// The sandbox's id. Usually the run's id.
    pub sandbox: RunId,
    /// The session that the sandbox belongs to.
    pub session: SessionId,
    /// The session's directory on the host.
    pub root: PathBuf,
}

/// The user and group of a command on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A plan that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mode {mode} cannot enforce {field} on this host{}", suffix(.remedy))]
pub struct PlanError {
    /// The path of the field at fault, as in the API.
    pub field: &'static str,
    /// The mode that was to enforce it.
    pub mode: Mode,
    /// What makes the host able to enforce it, if an operator can do something.
    pub remedy: Option<&'static str>,
}

fn suffix(remedy: &Option<&'static str>) -> String {
    remedy.map(|remedy| format!(": {remedy}")).unwrap_or_default()
}

impl Plan {
    /// Makes the plan for a run in mode `logical`.
    ///
    /// A requested limit that the host cannot enforce is refused. A default limit that it cannot
    /// enforce is listed in [`Plan::unenforced`], because this mode promises no isolation.
    ///
    /// # Errors
    /// Names the requested field that cannot be enforced.
    pub fn logical(target: PlanTarget, spec: &RunSpec, host: Enforceable) -> Result<Self, PlanError> {
        let PlanTarget { sandbox, session, root } = target;
        check_logical_network(spec.network)?;
        check_logical(&spec.policy)?;
        if spec.transaction.is_some() {
            check_transaction(Mode::Logical, &spec.policy, host)?;
        }
        let unenforced = unenforced_limits(&spec.requested_limits, host)?;
        Ok(Self {
            sandbox,
            session,
            mode: Mode::Logical,
            env: clean_env(&root),
            workspace: root.clone(),
            root,
            mounts: Vec::new(),
            layout: None,
            ids: None,
            hostname: None,
            limits: spec.limits.clone(),
            unenforced,
            watched: Vec::new(),
            io: IoLimits::default(),
            cpus: None,
            profile: None,
            network: NetworkMode::Host,
            egress: None,
            security: None,
        })
    }

    /// Makes the plan for a run in one of the isolating modes. `ids` are the command's ids on the host.
    ///
    /// Every limit, the policy and the network must be enforceable; otherwise the plan is refused.
    /// With best effort ([`Enforceable::watches`]) limits may be watched instead.
    ///
    /// # Errors
    /// Names the field that cannot be enforced.
    pub fn isolated(
        target: PlanTarget,
        spec: &RunSpec,
        host: &HostInfo,
        ids: Ids,
    ) -> Result<Self, PlanError> {
        let PlanTarget { sandbox, session, root } = target;
        let watches = host.enforceable.watches;
        let refuse = |field| PlanError { field, mode: spec.mode, remedy: remedy(field, spec.mode, watches) };
        if let Some(field) = unenforceable_field(spec.mode, &spec.policy, host.enforceable) {
            return Err(refuse(field));
        }
        if spec.transaction.is_some() {
            check_transaction(spec.mode, &spec.policy, host.enforceable)?;
        }
        if mounts::overlays_touch_sessions(&spec.policy, &host.runtime, session, &root) {
            return Err(refuse(OVERLAY_PATHS));
        }
        let network = isolated_network(spec.mode, spec.network, &spec.policy, host.enforceable)?;
        let mounts = mounts(&root, spec, network, &host.runtime, ids);
        let security = Security::from_policy(&spec.policy, spec.level(), host.enforceable, &mounts);
        if asks_for_free_files(&security, &mounts) {
            return Err(refuse(READ_ONLY_PATHS));
        }
        Ok(Self {
            sandbox,
            session,
            mode: spec.mode,
            layout: Layout::from_policy(&spec.policy.layout, &mounts),
            mounts,
            root,
            workspace: WORKSPACE.into(),
            ids: Some(ids),
            env: isolated_env(network),
            hostname: Some(HOSTNAME.to_owned()),
            limits: spec.limits.clone(),
            unenforced: unwatchable_limits(&spec.requested_limits, host.enforceable).map_err(refuse)?,
            watched: watched_limits(host.enforceable),
            io: IoLimits::from_policy(&spec.policy),
            cpus: spec.policy.resources.cpus.clone(),
            profile: spec.policy.container.profile.clone(),
            network,
            egress: (network == NetworkMode::Proxy).then(|| EgressRules::from_policy(&spec.policy.network)),
            security: Some(security),
        })
    }

    /// Checks whether any host could carry out such a run, so that the api can refuse it before it
    /// is recorded.
    ///
    /// # Errors
    /// Names the field that no host can enforce.
    pub fn check(mode: Mode, network: Option<NetworkMode>, policy: &Policy) -> Result<(), PlanError> {
        if mode == Mode::Logical {
            check_logical_network(network)?;
            return check_logical(policy);
        }
        match unenforceable_field(mode, policy, Enforceable::EVERYTHING) {
            Some(field) => Err(PlanError { field, mode, remedy: remedy(field, mode, true) }),
            None => isolated_network(mode, network, policy, Enforceable::EVERYTHING).map(drop),
        }
    }

    /// Checks whether any host could execute a transactional run like this.
    ///
    /// # Errors
    /// Names the field `transaction`.
    pub fn check_transaction(mode: Mode, policy: &Policy) -> Result<(), PlanError> {
        check_transaction(mode, policy, Enforceable::EVERYTHING)
    }

    /// Has the sandbox keep all changes of the workspace in this directory.
    #[must_use]
    pub fn with_transaction(mut self, layer: &Path) -> Self {
        for mount in &mut self.mounts {
            if let Mount::Bind { source, target, writable: true } = mount
                && *source == self.root
                && *target == self.workspace
            {
                let (source, target, layer) = (source.clone(), target.clone(), layer.to_owned());
                *mount = Mount::Transaction { source, target, layer };
            }
        }
        self
    }

    /// The host paths outside of the session's directory that the command may write to.
    #[must_use]
    pub fn writable_host_paths(&self) -> Vec<PathBuf> {
        let shared = |mount: &Mount| match mount {
            Mount::Bind { source, writable: true, .. } if *source != self.root => Some(source.clone()),
            _ => None,
        };
        self.mounts.iter().filter_map(shared).collect()
    }

    /// The fields of the limits that the host cannot enforce, as results and events report them.
    #[must_use]
    pub fn unenforced_fields(&self) -> Vec<String> {
        fields(&self.unenforced)
    }

    /// The fields of the limits that are only watched, as results and events report them.
    #[must_use]
    pub fn watched_fields(&self) -> Vec<String> {
        fields(&self.watched)
    }
}

/// Whether a path whose reads are asked for is below one that every command reads.
fn asks_for_free_files(security: &Security, mounts: &[Mount]) -> bool {
    let free = security.free_reads(mounts);
    security.asked_reads.iter().any(|asked| free.iter().any(|free| asked.starts_with(free)))
}

fn fields(limits: &[Limit]) -> Vec<String> {
    limits.iter().map(|limit| limit.field().to_owned()).collect()
}

/// The environment of an isolated command, with the variables of its proxy.
fn isolated_env(network: NetworkMode) -> BTreeMap<String, String> {
    let mut env = clean_env(Path::new(WORKSPACE));
    if network == NetworkMode::Proxy {
        env.extend(egress::variables());
    }
    env
}

/// The environment that a command starts from. It has nothing of the worker's environment.
fn clean_env(home: &Path) -> BTreeMap<String, String> {
    [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()),
        ("HOME", home.display().to_string()),
        ("LANG", "C.UTF-8".to_owned()),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

#[cfg(test)]
mod tests {
    use codelia_types::CommandSpec;

    use super::*;
    use crate::{FilesystemMode, LimitsRequest, SyscallMode, syscalls};

    fn spec(requested_limits: LimitsRequest, network: Option<NetworkMode>) -> RunSpec {
        RunSpec {
            command: CommandSpec::new(["true"]),
            mode: Mode::Logical,
            network,
            limits: Limits::default(),
            requested_limits,
            policy: Policy::default(),
            ends_with_caller: false,
            tool: None,
            transaction: None,
        }
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
        let error = plan(&spec(LimitsRequest::default(), Some(NetworkMode::None)), Enforceable::default());
        assert_eq!(error.unwrap_err().field, "network");
    }

    fn isolated(policy: Policy, network: Option<NetworkMode>, host: &HostInfo) -> Result<Plan, PlanError> {
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
        let writable: Vec<_> =
            plan.mounts.iter().filter(|mount| matches!(mount, Mount::Bind { writable: true, .. })).collect();
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
        assert_eq!(isolated(policy, None, &host).unwrap_err().field, "policy.process.allowed_executables");
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
        for requested in [None, Some(NetworkMode::None), Some(NetworkMode::Proxy), Some(NetworkMode::Host)] {
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
        assert!(error.to_string().contains("use mode native"), "only isolating modes have `none`: {error}");
        let error = isolated(policy, None, &HostInfo::fully_capable()).unwrap_err();
        assert_eq!(error.field, "policy.network.executables");
    }

    #[test]
    fn denied_paths_are_hidden_last() {
        let mut policy = Policy::default();
        policy.filesystem.read_only_paths = Some(vec!["/opt/a/b".into(), "/opt".into(), "/srv/no/x".into()]);
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
}
