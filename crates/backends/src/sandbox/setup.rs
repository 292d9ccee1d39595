//! Converts a plan into the setup request for `codelia-init`.

use std::{fs, os::unix::fs::MetadataExt, sync::LazyLock};

use codelia_init::{ExpectedEnvironment, ExpectedMount, Rlimit, SecuritySetup, Setup};
use codelia_policy::{Mount, Plan, SANDBOX_IDS, Security};
use codelia_sys::rlimit::Resource;
use codelia_types::NetworkMode;

use crate::{Error, seccomp};

/// Names and numbers of this process's namespaces. An isolated command must not be in any of them.
static OWN_NAMESPACES: LazyLock<Vec<(&str, u64)>> = LazyLock::new(|| {
    let number = |name| Some((name, fs::metadata(format!("/proc/self/ns/{name}")).ok()?.ino()));
    ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"].into_iter().filter_map(number).collect()
});

/// More than any ordinary program uses. POSIX timers count too.
const MAX_PENDING_SIGNALS: u64 = 4096;

/// The kernel's own default.
const MAX_MESSAGE_QUEUE_BYTES: u64 = 819_200;

/// The setup for a plan. A mode that differs changes `expected` before it hands the setup to the
/// sandbox; the sandbox adds the control groups.
///
/// # Errors
/// No filter can be built for the plan's system calls.
pub(crate) fn of(plan: &Plan) -> Result<Setup, Error> {
    let security = plan.security.as_ref().map(|security| security_setup(plan, security)).transpose()?;
    Ok(Setup {
        cgroup_fds: 0,
        rlimits: rlimits(plan),
        workspace: security.is_some().then(|| plan.workspace.clone()),
        stay_after_exit: false,
        relay_launch: false,
        security,
    })
}

/// Does not limit the number of processes: the kernel counts that rlimit per host user, while the
/// group counts it per sandbox.
fn rlimits(plan: &Plan) -> Vec<Rlimit> {
    let limits = &plan.limits;
    let whole_seconds = limits.cpu_time.as_secs() + u64::from(limits.cpu_time.subsec_nanos() > 0);
    vec![
        Rlimit { resource: Resource::OpenFiles, max: limits.open_files },
        // Not 0: with 0 the kernel still starts a core dump handler (`core_pattern` with a pipe).
        Rlimit { resource: Resource::CoreBytes, max: 1 },
        Rlimit { resource: Resource::FileBytes, max: limits.file_bytes },
        // A fallback: the group's CPU time is exact, and the worker kills the command by it.
        Rlimit { resource: Resource::CpuSeconds, max: whole_seconds + 1 },
        Rlimit { resource: Resource::PendingSignals, max: MAX_PENDING_SIGNALS },
        Rlimit { resource: Resource::MessageQueueBytes, max: MAX_MESSAGE_QUEUE_BYTES },
    ]
}

fn security_setup(plan: &Plan, security: &Security) -> Result<SecuritySetup, Error> {
    Ok(SecuritySetup {
        expected: expected_environment(plan),
        executables: security.executables.clone(),
        filter: seccomp::filter(security)?.to_vec(),
        init_filter: seccomp::init_filter()?,
        notify: security.violation_limit.is_some(),
    })
}

fn expected_environment(plan: &Plan) -> ExpectedEnvironment {
    let is_shared = |name: &str| name == "net" && plan.network == NetworkMode::Host;
    ExpectedEnvironment {
        host_namespaces: OWN_NAMESPACES
            .iter()
            .filter(|(name, _)| !is_shared(name))
            .map(|&(name, number)| (name.to_owned(), number))
            .collect(),
        mounts: plan.mounts.iter().filter_map(expected_mount).collect(),
        hostname: plan.hostname.clone(),
        uid: SANDBOX_IDS.uid,
        gid: SANDBOX_IDS.gid,
    }
}

/// `None` for what some mode creates without a separate mount: init does not check it.
fn expected_mount(mount: &Mount) -> Option<ExpectedMount> {
    let (target, writable) = match mount {
        Mount::Bind { target, writable, .. } => (target.clone(), Some(*writable)),
        Mount::Overlay { target, .. } => (target.clone(), Some(true)),
        Mount::Tmpfs { target, .. } => (target.clone(), Some(true)),
        Mount::Proc => ("/proc".into(), None),
        Mount::Dev | Mount::Symlink { .. } | Mount::File { .. } | Mount::Hidden { .. } => return None,
    };
    Some(ExpectedMount { target, writable })
}
