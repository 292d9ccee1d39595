//! A plan: policy made concrete for one sandbox. Plain data that a backend carries out whole or
//! refuses; it never carries out a part.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    EnvironmentMode, IsolationLevel, Limit, Limits, LimitsRequest, Mount, Policy, RunSpec, Runtime,
    SyscallMode, WORKSPACE,
    mounts::{self, mounts},
    syscalls,
};
use codelia_types::{Mode, NetworkMode, RunId, SessionId};

/// The host name inside a sandbox.
const HOSTNAME: &str = "codelia";

/// So many blocked system calls end a run, unless its policy says less or more.
pub(crate) const VIOLATION_LIMIT: u32 = 50;

/// The fields that more than one function names.
const OVERLAYS: &str = "policy.filesystem.overlay_paths";

const FILES_MODE: &str = "policy.filesystem.mode";
const CPUS: &str = "policy.resources.cpus";
const PROFILE: &str = "policy.container.profile";

/// Everything a backend must set up around a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Names the sandbox: cgroups, sockets and containers carry it. Usually the run's id.
    pub sandbox: RunId,
    /// The session it belongs to.
    pub session: SessionId,
    /// Which backend carries it out.
    pub mode: Mode,
    /// The session's directory on the host; the only writable place of the host.
    pub root: PathBuf,
    /// Where that directory is inside. In mode `logical` the same.
    pub workspace: PathBuf,
    /// Mounts, in the order they are made. Empty in mode `logical`.
    pub mounts: Vec<Mount>,
    /// Who the command runs as; `None` keeps the worker's own ids (mode `logical`).
    pub ids: Option<Ids>,
    /// The whole environment of the command, before its own additions.
    pub env: BTreeMap<String, String>,
    /// Host name inside; `None` keeps the host's (mode `logical`).
    pub hostname: Option<String>,
    /// Limits that hold.
    pub limits: Limits,
    /// Limits that the host cannot enforce. Empty except in mode `logical`.
    pub unenforced: Vec<Limit>,
    /// How fast it may read and write.
    pub io: IoLimits,
    /// The only processors it runs on.
    pub cpus: Option<Vec<u32>>,
    /// The name of its image, where it has one and not the worker's.
    pub profile: Option<String>,
    /// What the command may reach.
    pub network: NetworkMode,
    /// What holds the command inside; `None` in mode `logical` alone.
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

/// How fast a command may read from and write to the device that its session is on. `None` is not limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoLimits {
    /// Bytes read in a second.
    pub read_bytes: Option<u64>,
    /// Bytes written in a second.
    pub write_bytes: Option<u64>,
    /// Reads in a second.
    pub reads: Option<u64>,
    /// Writes in a second.
    pub writes: Option<u64>,
}

impl IoLimits {
    fn of(policy: &Policy) -> Self {
        let resources = &policy.resources;
        Self {
            read_bytes: resources.max_read_bytes_per_second,
            write_bytes: resources.max_write_bytes_per_second,
            reads: resources.max_reads_per_second,
            writes: resources.max_writes_per_second,
        }
    }

    /// The fields of a policy that asked for it, each with whether it is about reading.
    fn asked(self) -> impl Iterator<Item = (&'static str, bool)> {
        [
            ("policy.resources.max_read_bytes_per_second", true, self.read_bytes),
            ("policy.resources.max_reads_per_second", true, self.reads),
            ("policy.resources.max_write_bytes_per_second", false, self.write_bytes),
            ("policy.resources.max_writes_per_second", false, self.writes),
        ]
        .into_iter()
        .filter_map(|(field, reads, limit)| limit.map(|_| (field, reads)))
    }

    /// The first field of a policy that asked for any of it.
    #[must_use]
    pub fn field(self) -> Option<&'static str> {
        self.asked().next().map(|(field, _)| field)
    }
}

/// What holds a command inside: enforced by the kernel, the same in every isolating mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Security {
    /// Which system calls it may make.
    pub syscalls: SyscallRules,
    /// This many blocked calls end the run. `None` where the host cannot tell of them: they are refused
    /// all the same.
    pub violation_limit: Option<u32>,
    /// Whether it may start processes; threads it always may.
    pub fork: bool,
    /// Whether it may execute another program.
    pub exec: bool,
    /// The only programs that may be executed; `None` for any it can see.
    pub executables: Option<Vec<PathBuf>>,
    /// Whether its processes may trace each other.
    pub debug: bool,
}

/// Who the command runs as, outside the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A syscall filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "mode", content = "names")]
pub enum SyscallRules {
    /// Only these.
    Allow(Vec<String>),
    /// All but these.
    Deny(Vec<String>),
}

/// What a host can enforce in a mode, as far as a plan must know it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enforceable {
    /// Memory of all processes together.
    pub memory: bool,
    /// CPU rate.
    pub cpu: bool,
    /// Processes and threads together.
    pub pids: bool,
    /// A network of its own.
    pub network: bool,
    /// Which system calls are made.
    pub syscalls: bool,
    /// Which programs are executed.
    pub executables: bool,
    /// That blocked system calls are told of and counted.
    pub violations: bool,
    /// Directories of the host under a layer of the session's own.
    pub overlays: bool,
    /// How fast is read from a device.
    pub reads: bool,
    /// How fast is written to a device.
    pub writes: bool,
    /// Which processors are used.
    pub cpus: bool,
}

impl Enforceable {
    /// All of it.
    pub const EVERYTHING: Self = Self {
        memory: true,
        cpu: true,
        pids: true,
        network: true,
        syscalls: true,
        executables: true,
        violations: true,
        overlays: true,
        reads: true,
        writes: true,
        cpus: true,
    };
}

/// What a plan for an isolating mode must know about the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// What it can enforce.
    pub enforceable: Enforceable,
    /// What a sandbox shows of it.
    pub runtime: Runtime,
}

impl HostInfo {
    /// A host that can enforce everything, with the usual runtime.
    #[must_use]
    pub fn fully_capable() -> Self {
        Self { enforceable: Enforceable::EVERYTHING, runtime: Runtime::debian() }
    }
}

/// A plan that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mode {mode} cannot enforce {field} on this host")]
pub struct PlanError {
    /// The field at fault, as in the API.
    pub field: &'static str,
    /// The mode that was to enforce it.
    pub mode: Mode,
}

impl Plan {
    /// The fields of the limits that the host cannot enforce, as results and events report them.
    #[must_use]
    pub fn unenforced_fields(&self) -> Vec<String> {
        self.unenforced.iter().map(|limit| limit.field().to_owned()).collect()
    }

    /// The plan for a run in mode `logical`.
    ///
    /// What somebody asked for must be enforceable, or the plan is refused. A default that the
    /// host cannot enforce is listed in `unenforced`: this mode promises no isolation.
    ///
    /// # Errors
    /// Names the field that was asked for and cannot be enforced.
    pub fn logical(target: PlanTarget, spec: &RunSpec, host: Enforceable) -> Result<Self, PlanError> {
        let PlanTarget { sandbox, session, root } = target;
        if matches!(spec.network, Some(NetworkMode::None | NetworkMode::Proxy)) && !host.network {
            return Err(PlanError { field: "network", mode: Mode::Logical });
        }
        isolates_nothing(&spec.policy)?;
        let unenforced = unenforced(&spec.requested_limits, host)?;
        Ok(Self {
            sandbox,
            session,
            mode: Mode::Logical,
            env: clean_env(&root),
            workspace: root.clone(),
            root,
            mounts: Vec::new(),
            ids: None,
            hostname: None,
            limits: spec.limits.clone(),
            unenforced,
            io: IoLimits::default(),
            cpus: None,
            profile: None,
            network: NetworkMode::Host,
            security: None,
        })
    }

    /// Whether any host could carry out such a run: what a caller is told before anything is recorded.
    ///
    /// # Errors
    /// Names the field that no host can enforce.
    pub fn check(mode: Mode, network: Option<NetworkMode>, policy: &Policy) -> Result<(), PlanError> {
        if mode == Mode::Logical {
            return isolates_nothing(policy);
        }
        let missing = missing(mode, policy, HostInfo::fully_capable().enforceable);
        match missing.or(reach(network, policy).err()) {
            Some(field) => Err(PlanError { field, mode }),
            None => Ok(()),
        }
    }

    /// The plan for a run in one of the isolating modes. `ids` is who its processes are on the host.
    ///
    /// All of it is enforced or it is refused: every limit, the policy, the network.
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
        let refuse = |field| PlanError { field, mode: spec.mode };
        if let Some(field) = missing(spec.mode, &spec.policy, host.enforceable) {
            return Err(refuse(field));
        }
        if mounts::overlays_hold(&spec.policy, &host.runtime, &root) {
            return Err(refuse(OVERLAYS));
        }
        Ok(Self {
            sandbox,
            session,
            mode: spec.mode,
            mounts: mounts(&root, spec, &host.runtime, ids),
            root,
            workspace: WORKSPACE.into(),
            ids: Some(ids),
            env: clean_env(Path::new(WORKSPACE)),
            hostname: Some(HOSTNAME.to_owned()),
            limits: spec.limits.clone(),
            unenforced: Vec::new(),
            io: IoLimits::of(&spec.policy),
            cpus: spec.policy.resources.cpus.clone(),
            profile: spec.policy.container.profile.clone(),
            network: reach(spec.network, &spec.policy).map_err(refuse)?,
            security: Some(security(&spec.policy, host.enforceable)),
        })
    }
}

/// Refuses what mode `logical` cannot keep of a policy.
fn isolates_nothing(policy: &Policy) -> Result<(), PlanError> {
    let (files, process) = (&policy.filesystem, &policy.process);
    let some = |paths: &Option<Vec<PathBuf>>| paths.as_ref().is_some_and(|paths| !paths.is_empty());
    let asked = [
        ("policy.isolation_level", policy.isolation_level > Some(IsolationLevel::None)),
        ("policy.filesystem.read_only_paths", some(&files.read_only_paths)),
        ("policy.filesystem.read_write_paths", some(&files.read_write_paths)),
        ("policy.filesystem.overlay_paths", some(&files.overlay_paths)),
        ("policy.filesystem.denied_paths", !files.denied_paths.is_empty()),
        (FILES_MODE, files.mode.is_some()),
        (PROFILE, policy.container.profile.is_some()),
        (CPUS, policy.resources.cpus.is_some()),
        ("policy.filesystem.max_total_bytes", files.max_total_bytes.is_some()),
        ("policy.process.allow_fork", process.allow_fork == Some(false)),
        ("policy.process.allow_exec", process.allow_exec == Some(false)),
        ("policy.process.allowed_executables", process.allowed_executables.is_some()),
        ("policy.network.mode", matches!(policy.network.mode, Some(NetworkMode::None | NetworkMode::Proxy))),
        ("policy.syscalls", policy.syscalls.mode.is_some()),
        ("policy.environment.mode", policy.environment.mode == Some(EnvironmentMode::Inherit)),
    ];
    let first = asked.into_iter().find_map(|(field, asked)| asked.then_some(field));
    match first.or(IoLimits::of(policy).field()) {
        Some(field) => Err(PlanError { field, mode: Mode::Logical }),
        None => Ok(()),
    }
}

/// The first thing that an isolating mode needs and this host, or Codelia yet, cannot enforce.
fn missing(mode: Mode, policy: &Policy, host: Enforceable) -> Option<&'static str> {
    let needed = [
        ("mode", mode != Mode::Logical),
        ("policy.isolation_level", policy.isolation_level != Some(IsolationLevel::None)),
        (Limit::MemoryBytes.field(), host.memory),
        (Limit::CpuMillis.field(), host.cpu),
        (Limit::Pids.field(), host.pids),
        ("network", host.network),
        ("policy.syscalls", host.syscalls),
        (
            "policy.process.allowed_executables",
            host.executables || policy.process.allowed_executables.is_none(),
        ),
        // Who is not told of calls cannot tell the launch from what the command executes.
        ("policy.process.allow_exec", host.violations || policy.process.allow_exec != Some(false)),
        ("policy.syscalls.violation_limit", host.violations || violation_limit(policy) == VIOLATION_LIMIT),
        (
            OVERLAYS,
            host.overlays || policy.filesystem.overlay_paths.as_ref().is_none_or(|paths| paths.is_empty()),
        ),
        (CPUS, policy.resources.cpus.as_ref().is_none_or(|cpus| host.cpus && !cpus.is_empty())),
        (PROFILE, mode == Mode::Container || policy.container.profile.is_none()),
        ("policy.filesystem.max_total_bytes", policy.filesystem.max_total_bytes.is_none()),
        ("policy.filesystem.read_write_paths", policy.filesystem.below_writable().is_none()),
        ("policy.environment.mode", policy.environment.mode != Some(EnvironmentMode::Inherit)),
    ];
    let can = |reads| if reads { host.reads } else { host.writes };
    let too_fast = || IoLimits::of(policy).asked().find_map(|(field, reads)| (!can(reads)).then_some(field));
    needed.into_iter().find_map(|(field, held)| (!held).then_some(field)).or_else(too_fast)
}

/// What the command may reach: nothing yet but itself.
fn reach(asked: Option<NetworkMode>, policy: &Policy) -> Result<NetworkMode, &'static str> {
    for (field, mode) in [("policy.network.mode", policy.network.mode), ("network", asked)] {
        if matches!(mode, Some(NetworkMode::Proxy | NetworkMode::Host)) {
            return Err(field);
        }
    }
    Ok(NetworkMode::None)
}

fn security(policy: &Policy, host: Enforceable) -> Security {
    let process = &policy.process;
    let debug = process.debug.unwrap_or(false);
    Security {
        syscalls: SyscallRules::Allow(allowed_syscalls(policy, debug)),
        violation_limit: host.violations.then(|| violation_limit(policy)),
        fork: process.allow_fork.unwrap_or(true),
        exec: process.allow_exec.unwrap_or(true),
        executables: process.allowed_executables.clone(),
        debug,
    }
}

fn violation_limit(policy: &Policy) -> u32 {
    policy.syscalls.violation_limit.unwrap_or(VIOLATION_LIMIT)
}

/// The default list, narrowed by the policy.
fn allowed_syscalls(policy: &Policy, debug: bool) -> Vec<String> {
    let names = &policy.syscalls.names;
    let keeps = |name: &String| match policy.syscalls.mode {
        None => true,
        Some(SyscallMode::Allow) => names.contains(name),
        Some(SyscallMode::Deny) => !names.contains(name),
    };
    syscalls::allowed(debug).into_iter().filter(keeps).collect()
}

fn unenforced(asked: &LimitsRequest, host: Enforceable) -> Result<Vec<Limit>, PlanError> {
    let checks = [
        (Limit::MemoryBytes, host.memory, asked.memory_bytes.is_some()),
        (Limit::CpuMillis, host.cpu, asked.cpu_millis.is_some()),
        (Limit::Pids, host.pids, asked.pids.is_some()),
    ];
    let mut missing = Vec::new();
    for (limit, can, wanted) in checks {
        match (can, wanted) {
            (true, _) => {}
            (false, true) => return Err(PlanError { field: limit.field(), mode: Mode::Logical }),
            (false, false) => missing.push(limit),
        }
    }
    Ok(missing)
}

/// The environment a command starts from: nothing of the worker's.
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
    use super::*;
    use codelia_types::CommandSpec;

    fn spec(asked: LimitsRequest, network: Option<NetworkMode>) -> RunSpec {
        RunSpec {
            command: CommandSpec {
                argv: vec!["true".into()],
                env: BTreeMap::new(),
                working_directory: String::new(),
                terminal: None,
                stdin: false,
            },
            mode: Mode::Logical,
            network,
            limits: Limits::default(),
            requested_limits: asked,
            policy: Policy::default(),
            ends_with_caller: false,
        }
    }

    fn target() -> PlanTarget {
        PlanTarget { sandbox: RunId::generate(), session: SessionId::generate(), root: "/s".into() }
    }

    fn plan(spec: &RunSpec, host: Enforceable) -> Result<Plan, PlanError> {
        Plan::logical(target(), spec, host)
    }

    #[test]
    fn a_limit_that_was_asked_for_and_cannot_be_enforced_is_refused_by_name() {
        let asked = LimitsRequest { memory_bytes: Some(1), ..Default::default() };
        let error = plan(&spec(asked, None), Enforceable::default()).unwrap_err();
        assert_eq!(error.field, "limits.memory_bytes");
    }

    #[test]
    fn a_default_that_cannot_be_enforced_is_listed() {
        let plan = plan(&spec(LimitsRequest::default(), None), Enforceable::default()).unwrap();
        assert_eq!(plan.unenforced, [Limit::MemoryBytes, Limit::CpuMillis, Limit::Pids]);
    }

    #[test]
    fn a_network_that_was_asked_for_is_refused_where_there_is_none() {
        let error = plan(&spec(LimitsRequest::default(), Some(NetworkMode::None)), Enforceable::default());
        assert_eq!(error.unwrap_err().field, "network");
    }

    fn isolated(policy: Policy, network: Option<NetworkMode>, host: &HostInfo) -> Result<Plan, PlanError> {
        let spec = RunSpec { mode: Mode::Bwrap, policy, ..spec(LimitsRequest::default(), network) };
        let ids = Ids { uid: 200_000, gid: 200_000 };
        Plan::isolated(target(), &spec, host, ids)
    }

    #[test]
    fn only_the_workspace_is_a_writable_place_of_the_host_by_default() {
        let plan = isolated(Policy::default(), None, &HostInfo::fully_capable()).unwrap();
        let writable: Vec<_> =
            plan.mounts.iter().filter(|mount| matches!(mount, Mount::Bind { writable: true, .. })).collect();
        let workspace = Mount::Bind { source: "/s".into(), target: WORKSPACE.into(), writable: true };
        assert_eq!(writable, [&workspace]);
        assert_eq!(plan.network, NetworkMode::None);
        assert!(plan.unenforced.is_empty());
    }

    #[test]
    fn an_isolating_mode_refuses_what_the_host_cannot_enforce_even_by_default() {
        let mut host = HostInfo::fully_capable();
        host.enforceable.memory = false;
        assert_eq!(isolated(Policy::default(), None, &host).unwrap_err().field, "limits.memory_bytes");
        let mut host = HostInfo::fully_capable();
        host.enforceable.executables = false;
        let mut policy = Policy::default();
        assert!(isolated(policy.clone(), None, &host).is_ok());
        policy.process.allowed_executables = Some(vec!["/usr/bin/git".into()]);
        assert_eq!(isolated(policy, None, &host).unwrap_err().field, "policy.process.allowed_executables");
    }

    #[test]
    fn a_network_that_does_not_exist_yet_is_refused() {
        for mode in [NetworkMode::Proxy, NetworkMode::Host] {
            assert_eq!(
                isolated(Policy::default(), Some(mode), &HostInfo::fully_capable()).unwrap_err().field,
                "network"
            );
            let mut policy = Policy::default();
            policy.network.mode = Some(mode);
            assert_eq!(
                isolated(policy, None, &HostInfo::fully_capable()).unwrap_err().field,
                "policy.network.mode"
            );
        }
    }

    #[test]
    fn denied_paths_are_hidden_last_and_nothing_is_opened_below_them() {
        let mut policy = Policy::default();
        policy.filesystem.read_only_paths = Some(vec!["/opt/a/b".into(), "/opt".into(), "/srv/no/x".into()]);
        policy.filesystem.denied_paths = vec!["/srv/no".into(), "/opt/secret".into()];
        let plan = isolated(policy, None, &HostInfo::fully_capable()).unwrap();
        let tail: Vec<_> = plan.mounts.iter().rev().take(4).rev().map(Mount::target).collect();
        let expected = ["/opt", "/opt/a/b", "/srv/no", "/opt/secret"].map(Path::new);
        assert_eq!(tail, expected);
    }

    #[test]
    fn an_overlay_has_a_layer_beside_the_sessions_directory_and_what_is_hidden_in_it_comes_after_it() {
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
                Mount::Hidden { target: "/opt/a/b/.ssh".into(), even_if_absent: false },
            ]
        );
    }

    #[test]
    fn an_overlay_never_shows_where_sessions_are() {
        for path in ["/s", "/s/below"] {
            let mut policy = Policy::default();
            policy.filesystem.overlay_paths = Some(vec![path.into()]);
            assert_eq!(
                isolated(policy, None, &HostInfo::fully_capable()).unwrap_err().field,
                OVERLAYS,
                "{path}"
            );
        }
    }

    #[test]
    fn a_denied_path_behind_a_link_of_the_runtime_is_hidden_where_it_leads() {
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
    fn a_policy_narrows_the_system_calls() {
        let mut policy = Policy::default();
        policy.syscalls.mode = Some(SyscallMode::Deny);
        policy.syscalls.names = vec!["socket".to_owned()];
        let security = isolated(policy, None, &HostInfo::fully_capable()).unwrap().security.unwrap();
        let SyscallRules::Allow(names) = security.syscalls else { panic!("a plan has an allow-list") };
        assert_eq!(names.len(), syscalls::allowed(false).len() - 1);
        assert!(!names.contains(&"socket".to_owned()));
    }

    #[test]
    fn mode_logical_refuses_a_policy_it_cannot_keep() {
        let mut spec = spec(LimitsRequest::default(), None);
        spec.policy.process.allow_fork = Some(false);
        assert_eq!(plan(&spec, Enforceable::default()).unwrap_err().field, "policy.process.allow_fork");
    }
}
