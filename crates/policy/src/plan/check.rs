//! Whether a mode on a host can enforce a run: the checks that refuse a plan.

use codelia_types::{Mode, NetworkMode};

use super::{
    error::PlanError,
    host::Enforceable,
    io::{Direction, IoLimits},
    security::{DEFAULT_VIOLATION_LIMIT, violation_limit},
};
use crate::{
    EnvironmentMode, FilesystemMode, FilesystemPolicy, IsolationLevel, Limit, LimitsRequest,
    Policy, merge::values::has_entries,
};

pub(super) const NETWORK: &str = "network";
pub(super) const OVERLAY_PATHS: &str = "policy.filesystem.overlay_paths";
pub(super) const READ_ONLY_PATHS: &str = "policy.filesystem.read_only_paths";
const FILESYSTEM_MODE: &str = "policy.filesystem.mode";
const LAYOUT: &str = "policy.layout";
const VOLUMES: &str = "policy.filesystem.volumes";
const TRANSACTION: &str = "transaction";
const ISOLATION_LEVEL: &str = "policy.isolation_level";
const READ_WRITE_PATHS: &str = "policy.filesystem.read_write_paths";
const ALLOW_EXEC: &str = "policy.process.allow_exec";
const ALLOWED_EXECUTABLES: &str = "policy.process.allowed_executables";
const NETWORK_MODE: &str = "policy.network.mode";
const NETWORK_EXECUTABLES: &str = "policy.network.executables";
const SYSCALLS: &str = "policy.syscalls";
const ENVIRONMENT_MODE: &str = "policy.environment.mode";
const PROFILE: &str = "policy.container.profile";
const LOG_SIGNALS: &str = "policy.logging.signals";
const LOG_FILES: &str = "policy.logging.file_operations";
const CPUS: &str = "policy.resources.cpus";

/// Refuses a policy that mode `logical` cannot enforce.
pub(super) fn check_logical(policy: &Policy) -> Result<(), PlanError> {
    let files = &policy.filesystem;
    let process = &policy.process;
    let requested = [
        (ISOLATION_LEVEL, policy.isolation_level > Some(IsolationLevel::None)),
        (READ_ONLY_PATHS, has_entries(&files.read_only_paths)),
        (READ_WRITE_PATHS, has_entries(&files.read_write_paths)),
        (OVERLAY_PATHS, has_entries(&files.overlay_paths)),
        (VOLUMES, !files.mounted_volumes().is_empty()),
        ("policy.filesystem.denied_paths", !files.denied_paths.is_empty()),
        (FILESYSTEM_MODE, files.mode.is_some()),
        (LAYOUT, !policy.layout.is_empty()),
        (PROFILE, policy.container.profile.is_some()),
        (CPUS, policy.resources.cpus.is_some()),
        ("policy.process.allow_fork", process.allow_fork == Some(false)),
        (ALLOW_EXEC, process.allow_exec == Some(false)),
        (ALLOWED_EXECUTABLES, process.allowed_executables.is_some()),
        (NETWORK_MODE, matches!(policy.network.mode, Some(NetworkMode::None | NetworkMode::Proxy))),
        (NETWORK_EXECUTABLES, policy.network.executables.is_some()),
        (SYSCALLS, policy.syscalls.mode.is_some()),
        (ENVIRONMENT_MODE, policy.environment.mode == Some(EnvironmentMode::Inherit)),
        (LOG_SIGNALS, policy.logging.signals == Some(true)),
        (LOG_FILES, policy.logging.file_operations == Some(true)),
    ];
    let first =
        requested.into_iter().find_map(|(field, is_requested)| is_requested.then_some(field));
    let of_proxy = policy.proxy_field().map(|field| field.api_path);
    match first.or(of_proxy).or(IoLimits::from_policy(policy).field()) {
        Some(field) => Err(PlanError {
            field,
            mode: Mode::Logical,
            remedy: remedy(field, Mode::Logical, false),
        }),
        None => Ok(()),
    }
}

/// Refuses a requested network that mode `logical` cannot enforce. Its commands have the host's.
pub(super) fn check_logical_network(requested: Option<NetworkMode>) -> Result<(), PlanError> {
    match requested {
        Some(NetworkMode::None | NetworkMode::Proxy) => {
            Err(PlanError { field: NETWORK, mode: Mode::Logical, remedy: Some(ISOLATE) })
        }
        Some(NetworkMode::Host) | None => Ok(()),
    }
}

/// Refuses a transactional run that a mode on this host cannot keep apart from its workspace.
pub(super) fn check_transaction(
    mode: Mode,
    policy: &Policy,
    host: Enforceable,
) -> Result<(), PlanError> {
    let refuse = |remedy| Err(PlanError { field: TRANSACTION, mode, remedy: Some(remedy) });
    let files = &policy.filesystem;
    match mode {
        Mode::Logical | Mode::Container => refuse("use mode native, bwrap or nsjail"),
        _ if has_entries(&files.read_write_paths) || has_entries(&files.overlay_paths) => refuse(
            "leave out policy.filesystem.read_write_paths and overlay_paths, whose changes could not be dropped",
        ),
        _ if !policy.layout.is_empty() => {
            refuse("leave out policy.layout, whose limits would not count changes that wait")
        }
        _ if !files.mounted_volumes().is_empty() => {
            refuse("leave out policy.filesystem.volumes, whose changes could not be dropped")
        }
        _ if !host.overlays => refuse(
            "use a kernel that lets the worker mount overlays, with sessions on ext4, xfs or btrfs \
             (`codelia doctor`)",
        ),
        Mode::Bwrap | Mode::Nsjail | Mode::Native => Ok(()),
    }
}

/// The first field that an isolating mode needs and that this host, or this version, cannot
/// enforce.
pub(super) fn unenforceable_field(
    mode: Mode,
    policy: &Policy,
    host: Enforceable,
) -> Option<&'static str> {
    let files = &policy.filesystem;
    let process = &policy.process;
    let enforced = [
        ("mode", mode != Mode::Logical),
        (ISOLATION_LEVEL, policy.isolation_level != Some(IsolationLevel::None)),
        (Limit::MemoryBytes.field(), host.memory || host.watches),
        (Limit::CpuMillicores.field(), host.cpu || host.watches),
        (Limit::Pids.field(), host.pids || host.watches),
        (NETWORK, host.network),
        (NETWORK_EXECUTABLES, policy.network.executables.is_none()),
        (SYSCALLS, host.syscalls),
        (ALLOWED_EXECUTABLES, host.executables || process.allowed_executables.is_none()),
        // Without reports, the launch looks like any other program that the command executes.
        (ALLOW_EXEC, host.violations || process.allow_exec != Some(false)),
        (
            "policy.syscalls.violation_limit",
            host.violations || violation_limit(policy) == DEFAULT_VIOLATION_LIMIT,
        ),
        (FILESYSTEM_MODE, files.mode != Some(FilesystemMode::Dynamic) || can_ask(mode, host)),
        (OVERLAY_PATHS, host.overlays || !has_entries(&files.overlay_paths)),
        (LAYOUT, host.layouts || policy.layout.is_empty()),
        (VOLUMES, files.mounted_volumes().is_empty() || can_mount_volumes(mode, files, host)),
        (CPUS, policy.resources.cpus.as_ref().is_none_or(|cpus| host.cpus && !cpus.is_empty())),
        (PROFILE, mode == Mode::Container || policy.container.profile.is_none()),
        (READ_WRITE_PATHS, files.below_writable().is_none()),
        (ENVIRONMENT_MODE, policy.environment.mode != Some(EnvironmentMode::Inherit)),
        (LOG_SIGNALS, policy.logging.signals != Some(true) || can_log(mode, host)),
        (LOG_FILES, policy.logging.file_operations != Some(true) || can_log(mode, host)),
    ];
    let rate_limit = || {
        let is_enforced = |direction| match direction {
            Direction::Read => host.reads,
            Direction::Write => host.writes,
        };
        let mut fields = IoLimits::from_policy(policy).fields();
        fields.find_map(|(field, direction)| (!is_enforced(direction)).then_some(field))
    };
    enforced
        .into_iter()
        .find_map(|(field, is_enforced)| (!is_enforced).then_some(field))
        .or_else(rate_limit)
}

/// Whether reads of a command can wait for decisions. An image is one tree with its own files, of
/// which Landlock can leave out nothing.
fn can_ask(mode: Mode, host: Enforceable) -> bool {
    host.asked_reads && host.violations && mode != Mode::Container
}

/// Whether volumes can be mounted. An engine cannot map the owners of their files.
fn can_mount_volumes(mode: Mode, files: &FilesystemPolicy, host: Enforceable) -> bool {
    host.overlays && mode != Mode::Container && files.volume_conflict().is_none()
}

/// Whether calls of a command can be logged: they come with the reports of blocked calls.
fn can_log(mode: Mode, host: Enforceable) -> bool {
    host.violations && mode != Mode::Container
}

/// The network of an isolated command. Names the field that this host, or mode `host`, cannot
/// enforce.
pub(super) fn isolated_network(
    mode: Mode,
    requested: Option<NetworkMode>,
    policy: &Policy,
    host: Enforceable,
) -> Result<NetworkMode, PlanError> {
    let field = if requested.is_some() { NETWORK } else { NETWORK_MODE };
    let refuse = |remedy| Err(PlanError { field, mode, remedy: Some(remedy) });
    let network = policy.network.effective_mode(requested);
    match (network, mode, policy.proxy_field()) {
        (NetworkMode::Proxy, ..) if !host.egress => refuse(egress_remedy(mode)),
        // The kernel of such a runtime would take over the addresses of the host.
        (NetworkMode::Host, Mode::Container, _) if !host.violations => {
            refuse("use a container runtime on the host's kernel (runc)")
        }
        (NetworkMode::Host, _, Some(field)) => {
            let field = field.api_path;
            Err(PlanError { field, mode, remedy: remedy(field, mode, true) })
        }
        _ => Ok(network),
    }
}

/// How a host comes to offer network mode `proxy` in a mode.
#[must_use]
pub fn egress_remedy(mode: Mode) -> &'static str {
    match mode {
        Mode::Container => {
            "run the worker as root, with a container runtime on the host's kernel (runc) that has IPv6"
        }
        Mode::Bwrap | Mode::Nsjail | Mode::Native => {
            "use a kernel with IPv6 (without ipv6.disable=1) that lets users create network namespaces \
             (sysctl user.max_net_namespaces)"
        }
        Mode::Logical => "use mode native, bwrap, nsjail or container",
    }
}

/// How a host comes to enforce the limits of runs in a mode. `watches` if it watches them by now.
#[must_use]
pub fn limits_remedy(mode: Mode, watches: bool) -> &'static str {
    match mode {
        Mode::Container => {
            "give the container engine cgroups with the controllers memory, pids and cpu"
        }
        Mode::Bwrap | Mode::Nsjail | Mode::Native if !watches => {
            "start codelia in a delegated cgroup (systemd-run --user --scope -p Delegate=yes), or set \
             sandbox.limit_enforcement=best_effort to have limits watched instead"
        }
        Mode::Bwrap | Mode::Nsjail | Mode::Native | Mode::Logical => {
            "start codelia in a delegated cgroup (systemd-run --user --scope -p Delegate=yes)"
        }
    }
}

const ISOLATE: &str = "use mode native, bwrap, nsjail or container";

pub(super) fn remedy(field: &str, mode: Mode, watches: bool) -> Option<&'static str> {
    let limits = [Limit::MemoryBytes, Limit::CpuMillicores, Limit::Pids];
    match field {
        NETWORK_EXECUTABLES if mode == Mode::Logical => Some(
            "use mode native, bwrap, nsjail or container, and start the programs that need no network in \
             runs of their own, with network none",
        ),
        NETWORK_EXECUTABLES => {
            Some("start the programs that need no network in runs of their own, with network none")
        }
        FILESYSTEM_MODE if mode != Mode::Logical => Some(
            "use mode native, bwrap or nsjail, on a kernel with Landlock (5.19 or later, `landlock` in its \
             lsm= list)",
        ),
        LAYOUT if mode == Mode::Logical => Some(ISOLATE),
        LAYOUT => Some(
            "use mode native, bwrap or nsjail, or run the worker as root, with a container runtime on the \
             host's kernel (runc)",
        ),
        VOLUMES => Some(
            "use mode native, bwrap or nsjail, on a kernel that lets the worker mount overlays, with sessions on \
             ext4, xfs or btrfs (`codelia doctor`), and no path of another list above or below a volume",
        ),
        LOG_SIGNALS | LOG_FILES => Some("use mode native, bwrap or nsjail"),
        READ_ONLY_PATHS if mode != Mode::Logical => Some(
            "in filesystem.mode dynamic, leave out paths below what every command reads, such as /usr and /tmp",
        ),
        _ if limits.iter().any(|limit| limit.field() == field) => {
            Some(limits_remedy(mode, watches))
        }
        _ if !field.starts_with("policy.network.") => None,
        _ if mode == Mode::Logical => Some(ISOLATE),
        _ => Some("use network mode proxy"),
    }
}

/// The limits that an isolating mode only watches: what exceeds them ends a moment later.
pub(super) fn watched_limits(host: Enforceable) -> Vec<Limit> {
    let limits = [
        (Limit::MemoryBytes, host.memory),
        (Limit::Pids, host.pids),
        // The CPU time of all processes together is counted by the same groups.
        (Limit::CpuTime, host.cpu && host.pids && host.memory),
    ];
    limits.into_iter().filter(|(_, is_enforced)| !is_enforced).map(|(limit, _)| limit).collect()
}

/// The CPU rate cannot be watched. A default one is not enforced, a requested one is refused.
pub(super) fn unwatchable_limits(
    requested: &LimitsRequest,
    host: Enforceable,
) -> Result<Vec<Limit>, &'static str> {
    match (host.cpu, requested.cpu_millicores) {
        (true, _) => Ok(Vec::new()),
        (false, None) => Ok(vec![Limit::CpuMillicores]),
        (false, Some(_)) => Err(Limit::CpuMillicores.field()),
    }
}

/// The default limits that the host cannot enforce. A requested one is refused.
pub(super) fn unenforced_limits(
    requested: &LimitsRequest,
    host: Enforceable,
) -> Result<Vec<Limit>, PlanError> {
    let limits = [
        (Limit::MemoryBytes, host.memory, requested.memory_bytes.is_some()),
        (Limit::CpuMillicores, host.cpu, requested.cpu_millicores.is_some()),
        (Limit::Pids, host.pids, requested.pids.is_some()),
    ];
    let mut unenforced = Vec::new();
    for (limit, is_enforced, is_requested) in limits {
        match (is_enforced, is_requested) {
            (true, _) => {}
            (false, true) => {
                let field = limit.field();
                let mode = Mode::Logical;
                return Err(PlanError { field, mode, remedy: remedy(field, mode, false) });
            }
            (false, false) => unenforced.push(limit),
        }
    }
    Ok(unenforced)
}
