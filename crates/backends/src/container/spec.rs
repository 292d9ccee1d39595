//! Converts a plan into the container that the engine is asked to create. The file system is in
//! [`super::mounts`].

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig,
    ResourcesUlimits, RestartPolicy, RestartPolicyNameEnum,
};
use codelia_policy::Plan;
use codelia_sys::{proc_self, process, process_id::ProcessId, rlimit};
use codelia_types::NetworkMode;
use serde_json::json;

use super::{
    control_dir::ControlDir,
    engine::EngineKind,
    mounts::{CONTROL_SOCKET, Filesystem},
    options::ContainerOptions,
};
use crate::{
    Error,
    isolation::{self, INIT, utf8},
    mask::Masks,
};

/// The engine that a container is created in, and the process that creates it.
#[derive(Clone, Copy)]
pub(super) struct EngineTarget<'a> {
    pub(super) options: &'a ContainerOptions,
    pub(super) kind: EngineKind,
    pub(super) owner: ProcessId,
}

/// Labels of a container: the sandbox, the worker, the process that created it, and the PID
/// namespace of that process.
const SANDBOX_LABEL: &str = "codelia.sandbox";
const WORKER_LABEL: &str = "codelia.worker";
pub(super) const OWNER_LABEL: &str = "codelia.owner";
pub(super) const NAMESPACE_LABEL: &str = "codelia.pid-namespace";

/// The runtime needs this many processes and threads to start a container.
const PIDS_TO_START: i64 = 64;

/// The kernel's settings. Some belong to a namespace and could be written.
pub(super) const SETTINGS: &str = "/proc/sys";

/// In microseconds.
const CPU_PERIOD: i64 = 100_000;
const MIN_CPU_QUOTA: i64 = 1000;

/// Host threads of a runtime with its own kernel: for each process inside, and for the kernel.
const THREADS_PER_PROCESS: i64 = 8;
const KERNEL_THREADS: i64 = 512;

/// Podman's own default for processes of a user.
const PODMAN_MAX_PROCESSES: u64 = 32_768;

/// The PID namespace in which our process ids are valid.
pub(super) fn pid_namespace() -> Result<String, Error> {
    let number = proc_self::namespace_id("pid").map_err(std::io::Error::from)?;
    Ok(number.to_string())
}

/// The request to create a plan's container. Adds the files that it needs to the control directory.
pub(super) fn create_body(
    plan: &Plan,
    masks: &Masks,
    target: EngineTarget<'_>,
    control_dir: &mut ControlDir,
) -> Result<ContainerCreateBody, Error> {
    let EngineTarget { options, owner, .. } = target;
    let ids = isolation::ids(plan)?;
    let labels = [
        (SANDBOX_LABEL, plan.sandbox.to_string()),
        (WORKER_LABEL, options.worker.clone()),
        (OWNER_LABEL, owner.to_string()),
        (NAMESPACE_LABEL, pid_namespace()?),
    ];
    Ok(ContainerCreateBody {
        image: Some(options.image(plan)?.to_owned()),
        entrypoint: Some([INIT, "--connect", CONTROL_SOCKET].map(str::to_owned).to_vec()),
        cmd: Some(Vec::new()),
        user: Some(format!("{}:{}", ids.uid, ids.gid)),
        hostname: plan.hostname.clone(),
        working_dir: Some("/".to_owned()),
        network_disabled: Some(plan.network != NetworkMode::Host),
        labels: Some(labels.map(|(name, value)| (name.to_owned(), value)).into()),
        host_config: Some(host_config(plan, masks, target, control_dir)?),
        ..ContainerCreateBody::default()
    })
}

fn host_config(
    plan: &Plan,
    masks: &Masks,
    target: EngineTarget<'_>,
    control_dir: &mut ControlDir,
) -> Result<HostConfig, Error> {
    let EngineTarget { options, kind, .. } = target;
    let filesystem = Filesystem::new(plan, masks, target, control_dir)?;
    let security = security_options(kind, &filesystem.masked, control_dir)?;
    let memory = signed(plan.limits.memory_bytes);
    Ok(HostConfig {
        runtime: options.runtime.clone(),
        mounts: Some(filesystem.mounts),
        tmpfs: Some(filesystem.tmpfs),
        masked_paths: Some(filesystem.masked),
        readonly_paths: Some(vec![SETTINGS.to_owned()]),
        readonly_rootfs: Some(true),
        network_mode: Some(
            if plan.network == NetworkMode::Host { "host" } else { "none" }.to_owned(),
        ),
        // A private namespace without the engine's /dev/shm: the plan has one.
        ipc_mode: Some("none".to_owned()),
        cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(security),
        memory: Some(memory),
        // Memory plus swap: no swap.
        memory_swap: Some(memory),
        cpu_period: Some(CPU_PERIOD),
        cpu_quota: Some(
            (signed(plan.limits.cpu_millicores) * CPU_PERIOD / 1000).max(MIN_CPU_QUOTA),
        ),
        cpuset_cpus: plan.cpus.as_deref().map(cpu_list).transpose()?,
        pids_limit: Some(max_pids(plan).max(PIDS_TO_START)),
        ulimits: Some(ulimits(plan)),
        init: Some(false),
        auto_remove: Some(false),
        restart_policy: Some(RestartPolicy {
            name: Some(RestartPolicyNameEnum::NO),
            maximum_retry_count: None,
        }),
        log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
        ..HostConfig::default()
    })
}

/// Podman ignores Docker's field for masked paths, and takes the seccomp profile as a file.
fn security_options(
    kind: EngineKind,
    masked: &[String],
    control_dir: &mut ControlDir,
) -> Result<Vec<String>, Error> {
    let mut options = vec!["no-new-privileges".to_owned()];
    match kind {
        EngineKind::Docker => options.push(format!("seccomp={}", seccomp_profile())),
        EngineKind::Podman { .. } => {
            let file = control_dir.add_file(&seccomp_profile(), 0o600)?;
            options.push(format!("seccomp={}", utf8(&file)?));
            if masked.iter().any(|path| path.contains(':')) {
                return Err(Error::Unenforceable { field: "policy.filesystem.denied_paths" });
            }
            options.push(format!("mask={}", masked.join(":")));
        }
    }
    Ok(options)
}

/// The engine's seccomp profile: allows only this machine's native ABI and every call of it. The
/// filter of `codelia-init` decides about calls (ADR 6): a denial by this profile would not be
/// reported.
fn seccomp_profile() -> String {
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "SCMP_ARCH_AARCH64",
        _ => "SCMP_ARCH_X86_64",
    };
    json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": [architecture], "syscalls": [] })
        .to_string()
}

/// Includes `codelia-init`. For a runtime with its own kernel the limit is rough: it protects the
/// host from a fork bomb by ending the sandbox.
fn max_pids(plan: &Plan) -> i64 {
    let max = signed(plan.limits.pids).saturating_add(1);
    if plan.has_own_kernel() {
        max.saturating_mul(THREADS_PER_PROCESS).saturating_add(KERNEL_THREADS)
    } else {
        max
    }
}

/// The limit to set once the container has started, if the runtime could not start under it.
pub(super) fn pids_after_start(plan: &Plan) -> Option<i64> {
    Some(max_pids(plan)).filter(|max| *max < PIDS_TO_START)
}

/// The CPUs in the engine's syntax. Checks them first: the engine's error would be unclear.
fn cpu_list(requested: &[u32]) -> Result<String, Error> {
    let allowed = process::allowed_cpus()?;
    if !requested.iter().all(|number| allowed.contains(number)) {
        return Err(Error::Unenforceable { field: "policy.resources.cpus" });
    }
    Ok(requested.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The group limits processes. `nproc` is set only because Podman would otherwise raise it to more
/// than it is allowed to. A core limit of 0 would not stop a core dump handler.
fn ulimits(plan: &Plan) -> Vec<ResourcesUlimits> {
    let processes = rlimit::max_processes().min(PODMAN_MAX_PROCESSES);
    vec![ulimit("nofile", plan.limits.open_files), ulimit("core", 1), ulimit("nproc", processes)]
}

fn ulimit(name: &str, max: u64) -> ResourcesUlimits {
    let max = Some(signed(max));
    ResourcesUlimits { name: Some(name.to_owned()), soft: max, hard: max }
}
