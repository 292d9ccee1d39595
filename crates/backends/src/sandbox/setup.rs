//! From a plan to what `codelia-init` is told at its set-up.

use std::{fs, os::unix::fs::MetadataExt, sync::LazyLock};

use codelia_init::{ExpectedEnvironment, ExpectedMount, Rlimit, SecuritySetup, Setup};
use codelia_policy::{Mount, Plan, SANDBOX_IDS, Security};
use codelia_sys::rlimit::Resource;
use codelia_types::NetworkMode;

use crate::{Error, seccomp};

/// The namespaces of this process that no isolated command may be in, by name and number.
static OWN_NAMESPACES: LazyLock<Vec<(&str, u64)>> = LazyLock::new(|| {
    let number = |name| Some((name, fs::metadata(format!("/proc/self/ns/{name}")).ok()?.ino()));
    ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"].into_iter().filter_map(number).collect()
});

/// What a plan means to `codelia-init`. A mode that is made differently changes `expected` before it
/// hands it to the sandbox; the control groups are the sandbox's to add.
///
/// # Errors
/// The plan's system calls cannot be filtered.
pub(crate) fn of(plan: &Plan) -> Result<Setup, Error> {
    let security = plan.security.as_ref().map(|security| security_of(plan, security)).transpose()?;
    Ok(Setup {
        cgroup_fds: 0,
        rlimits: rlimits(plan),
        workspace: security.is_some().then(|| plan.workspace.clone()),
        stay_after_exit: false,
        relay_launch: false,
        security,
    })
}

/// No limit of processes: the kernel counts it for each user of the host, the group for the sandbox.
fn rlimits(plan: &Plan) -> Vec<Rlimit> {
    let limits = &plan.limits;
    let whole_seconds = limits.cpu_time.as_secs() + u64::from(limits.cpu_time.subsec_nanos() > 0);
    vec![
        Rlimit { resource: Resource::OpenFiles, max: limits.open_files },
        Rlimit { resource: Resource::CoreBytes, max: 0 },
        Rlimit { resource: Resource::FileBytes, max: limits.file_bytes },
        // The group counts exactly and ends the command; this is for when nobody watches it.
        Rlimit { resource: Resource::CpuSeconds, max: whole_seconds + 1 },
    ]
}

fn security_of(plan: &Plan, security: &Security) -> Result<SecuritySetup, Error> {
    Ok(SecuritySetup {
        expected: expected(plan),
        executables: security.executables.clone(),
        filter: seccomp::filter(security)?.to_vec(),
        notify: security.violation_limit.is_some(),
    })
}

fn expected(plan: &Plan) -> ExpectedEnvironment {
    let shared = |name: &str| name == "net" && plan.network == NetworkMode::Host;
    ExpectedEnvironment {
        host_namespaces: OWN_NAMESPACES
            .iter()
            .filter(|(name, _)| !shared(name))
            .map(|&(name, number)| (name.to_owned(), number))
            .collect(),
        mounts: plan.mounts.iter().filter_map(expected_mount).collect(),
        hostname: plan.hostname.clone(),
        uid: SANDBOX_IDS.uid,
        gid: SANDBOX_IDS.gid,
    }
}

/// What a mode makes otherwise than by a mount of its own is not looked for.
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
