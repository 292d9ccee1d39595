//! A plan: a policy made concrete for one sandbox.
//!
//! A plan is plain data. A backend carries it out completely or refuses it.

mod check;
mod error;
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
    isolated_network, remedy, unenforceable_field, unenforced_limits, unwatchable_limits,
    watched_limits,
};
use crate::{
    EgressRules, Ids, Layout, Limit, Limits, Mount, Policy, RunSpec, WORKSPACE, egress,
    mounts::{self, mounts},
};

pub(crate) use self::security::DEFAULT_VIOLATION_LIMIT;
pub use self::{
    check::{egress_remedy, limits_remedy},
    error::PlanError,
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
/// use codelia_policy::{Format, HostInfo, Ids, Mount, Plan, PlanTarget, Policy, RunSpec};
/// use codelia_types::{CommandSpec, Mode, NetworkMode, RunId, SessionId};
///
/// // A policy that shows the host's /opt, except for one directory.
/// let policy = Policy::parse(
///     "filesystem: {read_only_paths: [/opt], denied_paths: [/opt/secret]}",
///     Format::Yaml,
/// )?;
/// let spec = RunSpec { policy, ..RunSpec::new(CommandSpec::new(["ls", "/opt"]), Mode::Bwrap) };
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
    /// Changes of the mounts of the workspace once they are made. `None` changes nothing.
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
    /// Hosts that it may reach through the egress proxy. `None` in every other network mode. The
    /// proxy enforces it, so that a sandbox serves any rules.
    pub egress: Option<EgressRules>,
    /// Rules that the kernel enforces. `None` only in mode `logical`.
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

impl Plan {
    /// Whether it is for a container runtime with a kernel of its own: one that counts no
    /// violations.
    #[must_use]
    pub fn has_own_kernel(&self) -> bool {
        let counts =
            self.security.as_ref().is_some_and(|security| security.violation_limit.is_some());
        self.mode == Mode::Container && !counts
    }

    /// Makes the plan for a run in mode `logical`.
    ///
    /// A requested limit that the host cannot enforce is refused. A default limit that it cannot
    /// enforce is listed in [`Plan::unenforced`], because this mode promises no isolation.
    ///
    /// # Errors
    /// Names the requested field that cannot be enforced.
    pub fn logical(
        target: PlanTarget,
        spec: &RunSpec,
        host: Enforceable,
    ) -> Result<Self, PlanError> {
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

    /// Makes the plan for a run in one of the isolating modes. `ids` are the command's ids on the
    /// host.
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
        let refuse =
            |field| PlanError { field, mode: spec.mode, remedy: remedy(field, spec.mode, watches) };
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
            unenforced: unwatchable_limits(&spec.requested_limits, host.enforceable)
                .map_err(refuse)?,
            watched: watched_limits(host.enforceable),
            io: IoLimits::from_policy(&spec.policy),
            cpus: spec.policy.resources.cpus.clone(),
            profile: spec.policy.container.profile.clone(),
            network,
            egress: (network == NetworkMode::Proxy)
                .then(|| EgressRules::from_policy(&spec.policy.network)),
            security: Some(security),
        })
    }

    /// Checks whether any host could carry out such a run, so that the api can refuse it before it
    /// is recorded.
    ///
    /// # Errors
    /// Names the field that no host can enforce.
    pub fn check(
        mode: Mode,
        network: Option<NetworkMode>,
        policy: &Policy,
    ) -> Result<(), PlanError> {
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
                let source = source.clone();
                let target = target.clone();
                let layer = layer.to_owned();
                *mount = Mount::Transaction { source, target, layer };
            }
        }
        self
    }

    /// Has the sandbox mount the directories of its volumes, by the names of the volumes. A backend
    /// refuses a plan with a volume that has no directory.
    #[must_use]
    pub fn with_volumes(mut self, directories: &BTreeMap<String, PathBuf>) -> Self {
        for mount in &mut self.mounts {
            if let Mount::Volume { source, .. } = mount
                && let Some(directory) = source.to_str().and_then(|name| directories.get(name))
            {
                source.clone_from(directory);
            }
        }
        self
    }

    /// The host paths outside of the session's directory that the command may write to.
    #[must_use]
    pub fn writable_host_paths(&self) -> Vec<PathBuf> {
        let shared = |mount: &Mount| match mount {
            Mount::Bind { source, writable: true, .. } if *source != self.root => {
                Some(source.clone())
            }
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
mod tests;
