//! Converts a plan into the setup request for `codelia-init`.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use codelia_init::{
    ExpectedEnvironment, ExpectedMount, ExpectedNamespace, FileIdentity, NAMESPACES, Rlimit,
    SecuritySetup, Setup,
};
use codelia_policy::{Limit, Mount, Plan, SANDBOX_IDS, Security, VolumeMode};
use codelia_sys::{Errno, proc_self, rlimit::Resource};
use codelia_types::{Mode, NetworkMode};

use crate::{Error, isolation::SHOWN_IN_PROC, mounts::layout, sandbox::egress, seccomp};

/// The numbers of this process's namespaces. An isolated command must not be in any of them.
static OWN_NAMESPACES: LazyLock<Result<Vec<(&str, u64)>, Errno>> = LazyLock::new(|| {
    NAMESPACES
        .iter()
        .map(|&name| proc_self::namespace_id(name).map(|number| (name, number)))
        .collect()
});

/// More than any ordinary program uses. POSIX timers count too.
const MAX_PENDING_SIGNALS: u64 = 4096;

/// The kernel's own default.
const MAX_MESSAGE_QUEUE_BYTES: u64 = 819_200;

/// How far a watched number of processes can exceed its limit: the watcher must see more than the
/// limit, and a fork bomb must not outrun it.
const WATCHED_PIDS_MARGIN: u64 = 16;

/// The setup for a plan. A mode that differs changes `expected` before it hands the setup to the
/// sandbox; the sandbox adds the control groups.
///
/// # Errors
/// No filter can be built for the plan's system calls.
pub(crate) fn for_plan(plan: &Plan) -> Result<Setup, Error> {
    let security =
        plan.security.as_ref().map(|security| security_setup(plan, security)).transpose()?;
    Ok(Setup {
        cgroup_fds: 0,
        rlimits: rlimits(plan),
        workspace: security.is_some().then(|| plan.workspace.clone()),
        stay_after_exit: false,
        relay_launch: false,
        security,
    })
}

/// Limits the number of processes only if no group does: the group counts exactly.
fn rlimits(plan: &Plan) -> Vec<Rlimit> {
    let limits = &plan.limits;
    let whole_seconds = limits.cpu_time.as_secs() + u64::from(limits.cpu_time.subsec_nanos() > 0);
    let mut rlimits = vec![
        Rlimit { resource: Resource::OpenFiles, max: limits.open_files },
        // Not 0: with 0 the kernel still starts a core dump handler (`core_pattern` with a pipe).
        Rlimit { resource: Resource::CoreBytes, max: 1 },
        Rlimit { resource: Resource::FileBytes, max: limits.file_bytes },
        // A fallback: the group's CPU time is exact, and the worker kills the command by it.
        Rlimit { resource: Resource::CpuSeconds, max: whole_seconds + 1 },
        Rlimit { resource: Resource::PendingSignals, max: MAX_PENDING_SIGNALS },
        Rlimit { resource: Resource::MessageQueueBytes, max: MAX_MESSAGE_QUEUE_BYTES },
    ];
    if plan.watched.contains(&Limit::Pids) {
        let max = limits.pids.saturating_add(WATCHED_PIDS_MARGIN);
        rlimits.push(Rlimit { resource: Resource::Processes, max });
    }
    rlimits
}

fn security_setup(plan: &Plan, security: &Security) -> Result<SecuritySetup, Error> {
    // A file in memory is executed as one in `/tmp` is.
    let seals_memory_files = plan.layout.as_ref().is_some_and(|layout| !layout.executable);
    Ok(SecuritySetup {
        // A container has a network before init runs.
        egress: (plan.network == NetworkMode::Proxy && plan.mode != Mode::Container)
            .then(egress::request),
        view: None,
        expected: expected_environment(plan)?,
        executables: security.executables.clone(),
        readable: readable(plan, security)?,
        shares_network: plan.network == NetworkMode::Host,
        filter: seccomp::filter(security, seals_memory_files)?.to_vec(),
        init_filter: seccomp::init_filter()?,
        notify: security.violation_limit.is_some(),
    })
}

/// The paths that a command may read without a decision; `None` if no read waits. Landlock grants
/// whole trees, so that nothing below one of them can wait.
fn readable(plan: &Plan, security: &Security) -> Result<Option<Vec<PathBuf>>, Error> {
    if security.asked_reads.is_empty() {
        return Ok(None);
    }
    let free = security.free_reads(&plan.mounts);
    if security.asked_reads.iter().any(|asked| free.iter().any(|free| asked.starts_with(free))) {
        return Err(Error::Unenforceable { field: "policy.filesystem.read_only_paths" });
    }
    Ok(Some(free))
}

fn expected_environment(plan: &Plan) -> Result<ExpectedEnvironment, Error> {
    let own = OWN_NAMESPACES.as_ref().map_err(|errno| io::Error::from(*errno))?;
    let expected = |name: &str, number| match (name, plan.network) {
        ("net", NetworkMode::Host) => ExpectedNamespace::Shared,
        _ => ExpectedNamespace::Not(number),
    };
    let mut mounts = plan.mounts.iter().filter_map(expected_mount).collect();
    layout::expect(plan, &mut mounts);
    Ok(ExpectedEnvironment {
        namespaces: own
            .iter()
            .map(|&(name, number)| (name.to_owned(), expected(name, number)))
            .collect(),
        // Of several mounts at one target the last is visible.
        mounts,
        covered: None,
        shown_in_proc: Some(SHOWN_IN_PROC.map(str::to_owned).to_vec()),
        hostname: plan.hostname.clone(),
        uid: SANDBOX_IDS.uid,
        gid: SANDBOX_IDS.gid,
        locks_secure_bits: true,
        reports_restrictions: true,
    })
}

/// `None` for what needs no mount. A hidden path is masked later, where it exists.
fn expected_mount(mount: &Mount) -> Option<(PathBuf, ExpectedMount)> {
    let expected = |writable, file_system: Option<&str>| ExpectedMount {
        writable: Some(writable),
        file_system: file_system.map(str::to_owned),
        ..ExpectedMount::default()
    };
    let mounted = match mount {
        Mount::Bind { source, target, writable } => ExpectedMount {
            identity: directory_identity(source),
            // A directory of the host, not the workspace.
            is_recursive: source == target,
            ..expected(*writable, None)
        },
        // One tool copies the files.
        Mount::Runtime { path } => {
            ExpectedMount { is_optional: !path.is_dir(), ..expected(false, None) }
        }
        Mount::Overlay { .. } | Mount::Transaction { .. } => expected(true, Some("overlay")),
        Mount::Volume { mode: VolumeMode::Copy, .. } => expected(true, Some("overlay")),
        Mount::Volume { source, mode, .. } => ExpectedMount {
            identity: directory_identity(source),
            ..expected(*mode == VolumeMode::Exclusive, None)
        },
        Mount::Tmpfs { .. } => expected(true, Some("tmpfs")),
        Mount::Proc => expected(true, Some("proc")),
        Mount::Dev => {
            ExpectedMount { file_system: Some("tmpfs".to_owned()), ..ExpectedMount::default() }
        }
        // Files are copied or mounted.
        Mount::File { .. } => ExpectedMount { is_optional: true, ..expected(false, None) },
        Mount::Symlink { .. } | Mount::Hidden { .. } => return None,
    };
    Some((mount.target().to_owned(), mounted))
}

/// Which directory is at a path. `None` for a file: the host may replace it at any time.
fn directory_identity(path: &Path) -> Option<FileIdentity> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_dir)?;
    Some(FileIdentity::from(&metadata))
}
