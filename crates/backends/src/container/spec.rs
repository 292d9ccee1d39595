//! From a plan to the container that the engine is asked for.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

use bollard::models::{
    ContainerCreateBody, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig, Mount as EngineMount,
    MountBindOptions, MountBindOptionsPropagationEnum, MountType, ResourcesUlimits, RestartPolicy,
    RestartPolicyNameEnum,
};
use codelia_policy::{Ids, Mount, Plan};
use codelia_sys::{proc_self, process, process_id::ProcessId, rlimit};
use serde_json::json;

use super::{Channel, ContainerOptions, engine::Family};
use crate::{
    Error,
    tool::mask::{self, Hidden},
    tool::tool_backend::{self, INIT},
};

/// Where `codelia-init` finds its socket. Nobody answers there once it has connected.
const CONTROL: &str = "/.codelia-control";

/// The labels of a container: its sandbox, the worker it is for, the process that made it, and the
/// process namespace which that one was in.
const SANDBOX: &str = "codelia.sandbox";
const WORKER: &str = "codelia.worker";
pub(super) const OWNER: &str = "codelia.owner";
pub(super) const PLACE: &str = "codelia.pid-namespace";

/// Where process ids mean what they mean to us.
pub(super) fn place() -> Result<String, Error> {
    let number = proc_self::namespace_id("pid").map_err(std::io::Error::from)?;
    Ok(number.to_string())
}

/// What engines hide of `/proc` by default, and all of `/sys`.
const MASKED: [&str; 10] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys",
];

/// The runtime needs so many processes and threads to start a container.
const PIDS_TO_START: i64 = 64;

/// The container of a plan. Files that it needs are put into the channel.
pub(super) fn container(
    plan: &Plan,
    options: &ContainerOptions,
    family: Family,
    owner: ProcessId,
    channel: &mut Channel,
) -> Result<ContainerCreateBody, Error> {
    let ids = tool_backend::ids(plan)?;
    let labels = [
        (SANDBOX, plan.sandbox.to_string()),
        (WORKER, options.worker.clone()),
        (OWNER, owner.to_string()),
        (PLACE, place()?),
    ];
    Ok(ContainerCreateBody {
        image: Some(options.image(plan)?.to_owned()),
        entrypoint: Some([INIT, "--connect", CONTROL].map(str::to_owned).to_vec()),
        cmd: Some(Vec::new()),
        user: Some(format!("{}:{}", ids.uid, ids.gid)),
        hostname: plan.hostname.clone(),
        working_dir: Some("/".to_owned()),
        network_disabled: Some(true),
        labels: Some(labels.map(|(name, value)| (name.to_owned(), value)).into()),
        host_config: Some(host_config(plan, options, family, channel)?),
        ..ContainerCreateBody::default()
    })
}

fn host_config(
    plan: &Plan,
    options: &ContainerOptions,
    family: Family,
    channel: &mut Channel,
) -> Result<HostConfig, Error> {
    let files = Files::of(plan, options, family, channel)?;
    let security = security(family, &files.masked, channel)?;
    let memory = signed(plan.limits.memory_bytes);
    Ok(HostConfig {
        runtime: options.runtime.clone(),
        mounts: Some(files.mounts),
        tmpfs: Some(files.tmpfs),
        masked_paths: Some(files.masked),
        readonly_rootfs: Some(true),
        network_mode: Some("none".to_owned()),
        // Its own, without the engine's /dev/shm: the plan has one.
        ipc_mode: Some("none".to_owned()),
        cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
        cap_drop: Some(vec!["ALL".to_owned()]),
        security_opt: Some(security),
        memory: Some(memory),
        // Memory and swap together: no swap.
        memory_swap: Some(memory),
        cpu_period: Some(CPU_PERIOD),
        cpu_quota: Some((signed(plan.limits.cpu_millis) * CPU_PERIOD / 1000).max(LEAST_CPU_QUOTA)),
        cpuset_cpus: plan.cpus.as_deref().map(processors).transpose()?,
        pids_limit: Some(pids(plan).max(PIDS_TO_START)),
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

/// Podman overlooks the masks that Docker knows, and looks for the profile in a file.
fn security(family: Family, masked: &[String], channel: &mut Channel) -> Result<Vec<String>, Error> {
    let mut security = vec!["no-new-privileges".to_owned()];
    match family {
        Family::Docker => security.push(format!("seccomp={}", profile())),
        Family::Podman { .. } => {
            let file = channel.add_file(&profile(), 0o600)?;
            security.push(format!("seccomp={}", text(&file)?));
            if masked.iter().any(|path| path.contains(':')) {
                return Err(Error::Unenforceable { field: "policy.filesystem.denied_paths" });
            }
            security.push(format!("mask={}", masked.join(":")));
        }
    }
    Ok(security)
}

/// In microseconds.
const CPU_PERIOD: i64 = 100_000;
const LEAST_CPU_QUOTA: i64 = 1000;

/// `codelia-init` counts too. A runtime with a kernel of its own has threads on the host for it, and several for
/// each process inside: the host is kept from a bomb, which ends the sandbox, but the limit is a rough one.
fn pids(plan: &Plan) -> i64 {
    let most = signed(plan.limits.pids).saturating_add(1);
    if has_own_kernel(plan) {
        most.saturating_mul(THREADS_OF_A_PROCESS).saturating_add(THREADS_OF_A_KERNEL)
    } else {
        most
    }
}

const THREADS_OF_A_PROCESS: i64 = 8;
const THREADS_OF_A_KERNEL: i64 = 512;

/// Whether the runtime's kernel is not the host's, which is what a plan means that counts no violations.
pub(super) fn has_own_kernel(plan: &Plan) -> bool {
    plan.security.as_ref().is_none_or(|security| security.violation_limit.is_none())
}

/// The limit that holds once the container was started, if it could not hold before.
pub(super) fn later_pids(plan: &Plan) -> Option<i64> {
    Some(pids(plan)).filter(|most| *most < PIDS_TO_START)
}

/// As the engine takes them. It would not say so plainly if there is no such processor.
fn processors(wanted: &[u32]) -> Result<String, Error> {
    let there = process::allowed_cpus()?;
    if !wanted.iter().all(|number| there.contains(number)) {
        return Err(Error::Unenforceable { field: "policy.resources.cpus" });
    }
    Ok(wanted.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Processes are limited by the group; without a limit of their user Podman would raise it to more than it may.
fn ulimits(plan: &Plan) -> Vec<ResourcesUlimits> {
    let processes = rlimit::max_processes().min(PIDS_OF_A_USER);
    [("nofile", plan.limits.open_files), ("core", 0), ("nproc", processes)].map(ulimit).to_vec()
}

/// What Podman itself is content with.
const PIDS_OF_A_USER: u64 = 32_768;

fn ulimit((name, most): (&str, u64)) -> ResourcesUlimits {
    let most = Some(signed(most));
    ResourcesUlimits { name: Some(name.to_owned()), soft: most, hard: most }
}

/// The engine's filter of system calls: this machine's own ABI and no other. What may be called is for
/// the filter of `codelia-init` to say (ADR 6): an answer given here would be heard by nobody.
fn profile() -> String {
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "SCMP_ARCH_AARCH64",
        _ => "SCMP_ARCH_X86_64",
    };
    json!({ "defaultAction": "SCMP_ACT_ALLOW", "architectures": [architecture], "syscalls": [] }).to_string()
}

/// What the engine is told about files. It mounts by depth, whatever the order.
#[derive(Default)]
struct Files {
    mounts: Vec<EngineMount>,
    tmpfs: HashMap<String, String>,
    masked: Vec<String>,
}

/// Something at one place.
enum Place {
    Bind { source: PathBuf, writable: bool },
    Tmpfs { options: String },
}

/// What is where. Of two at one place the later one is seen.
struct Layout<'a> {
    plan: &'a Plan,
    family: Family,
    /// The engine's, which no command may see.
    socket: &'a Path,
    channel: &'a mut Channel,
    places: BTreeMap<PathBuf, Place>,
    masked: Vec<String>,
}

impl Files {
    fn of(
        plan: &Plan,
        options: &ContainerOptions,
        family: Family,
        channel: &mut Channel,
    ) -> Result<Self, Error> {
        let places = [
            (INIT.into(), Place::Bind { source: options.init.clone(), writable: false }),
            (CONTROL.into(), Place::Bind { source: channel.socket(), writable: true }),
        ];
        let masked = MASKED.map(str::to_owned).to_vec();
        let mut layout =
            Layout { plan, family, socket: &options.socket, channel, places: places.into(), masked };
        for (index, mount) in plan.mounts.iter().enumerate() {
            layout.add(mount, &plan.mounts[..index])?;
        }
        layout.files()
    }
}

impl Layout<'_> {
    fn add(&mut self, mount: &Mount, made: &[Mount]) -> Result<(), Error> {
        let place = match mount {
            Mount::Bind { source, writable, .. } => {
                refuse_engine(source, self.socket)?;
                // Podman would make it.
                if !source.exists() {
                    let complaint = format!("{} is not there", source.display());
                    return Err(Error::Engine { step: "bind", complaint });
                }
                Place::Bind { source: source.clone(), writable: *writable }
            }
            Mount::Tmpfs { size_bytes, .. } => {
                tmpfs(&format!("rw,exec,mode=1777,size={size_bytes}{}", self.owner()?))
            }
            Mount::File { text, .. } => self.file(text, 0o444)?,
            Mount::Hidden { target, even_if_absent } => return self.hide(target, made, *even_if_absent),
            // The engine makes both, as every image needs them.
            Mount::Proc | Mount::Dev => return Ok(()),
            Mount::Overlay { .. } => {
                return Err(Error::Unenforceable { field: "policy.filesystem.overlay_paths" });
            }
            Mount::Symlink { .. } => return Err(Error::Unenforceable { field: "mounts" }),
        };
        self.places.insert(mount.target().to_owned(), place);
        Ok(())
    }

    /// Who a private directory belongs to, in case the runtime gives it the mode of the image's. Podman knows no such option.
    fn owner(&self) -> Result<String, Error> {
        let Ids { uid, gid } = tool_backend::ids(self.plan)?;
        Ok(if self.family == Family::Docker { format!(",uid={uid},gid={gid}") } else { String::new() })
    }

    fn hide(&mut self, target: &Path, made: &[Mount], even_if_absent: bool) -> Result<(), Error> {
        match mask::find(made, target, even_if_absent)? {
            Hidden::Directory(place) => drop(self.places.insert(place, tmpfs("ro,mode=0000,size=4096"))),
            Hidden::File(place) => {
                let nothing = self.file("", 0)?;
                self.places.insert(place, nothing);
            }
            Hidden::Nothing if !even_if_absent => {}
            // It may be in the image. The engine looks for it there, but a runtime with a kernel of its own
            // masks nothing.
            Hidden::Nothing if has_own_kernel(self.plan) => {
                return Err(Error::Unenforceable { field: "policy.filesystem.denied_paths" });
            }
            Hidden::Nothing => self.masked.push(text(target)?.to_owned()),
        }
        Ok(())
    }

    fn file(&mut self, text: &str, mode: u32) -> Result<Place, Error> {
        Ok(Place::Bind { source: self.channel.add_file(text, mode)?, writable: false })
    }

    fn files(self) -> Result<Files, Error> {
        // Podman would fill them with what they cover.
        let unfilled = if self.family == Family::Docker { "" } else { ",notmpcopyup" };
        let mut files = Files { masked: self.masked, ..Files::default() };
        for (target, place) in self.places {
            let target = text(&target)?.to_owned();
            match place {
                Place::Bind { source, writable } => files.mounts.push(bind_mount(&source, target, writable)?),
                Place::Tmpfs { options } => drop(files.tmpfs.insert(target, options + unfilled)),
            }
        }
        Ok(files)
    }
}

fn tmpfs(options: &str) -> Place {
    Place::Tmpfs { options: format!("nosuid,nodev,{options}") }
}

/// Without what is mounted below it: engines differ in whether that becomes read-only with it.
fn bind_mount(source: &Path, target: String, writable: bool) -> Result<EngineMount, Error> {
    Ok(EngineMount {
        typ: Some(MountType::BIND),
        source: Some(text(source)?.to_owned()),
        target: Some(target),
        read_only: Some(!writable),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::PRIVATE),
            non_recursive: Some(true),
            ..MountBindOptions::default()
        }),
        ..EngineMount::default()
    })
}

/// Who can speak to the engine is root on its host.
fn refuse_engine(source: &Path, socket: &Path) -> Result<(), Error> {
    let [source, socket] = [source, socket].map(|path| path.canonicalize().unwrap_or(path.to_owned()));
    if socket.starts_with(&source) {
        return Err(Error::Unenforceable { field: "policy.filesystem" });
    }
    Ok(())
}

fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or(Error::Unenforceable { field: "mounts" })
}
