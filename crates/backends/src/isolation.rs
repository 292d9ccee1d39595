//! Common parts of the isolating modes (bwrap, nsjail, native, container).

use std::path::Path;

use codelia_init::{Failure, Step};
use codelia_policy::{Ids, Limit, Plan, egress_remedy};
use codelia_sys::{Errno, Pid, process, pty};
use codelia_types::{Mode, NetworkMode};

use crate::{Error, Gap};

/// Path of `codelia-init` inside every sandbox.
pub(crate) const INIT: &str = "/.codelia-init";

/// Pseudo-terminals that one sandbox can open. The host has one pool for all (`kernel.pty.max`).
pub(crate) const MAX_TERMINALS: u32 = 64;

/// Limits the pseudo-terminals of the sandbox of a process. Does nothing unless we are root.
pub(crate) fn limit_terminals(process: Pid) -> Result<(), Errno> {
    if process::own_uid() == 0 { pty::limit(process, MAX_TERMINALS) } else { Ok(()) }
}

/// Path of `codelia-init` in the sandbox of a probe, which runs it as its command.
pub(crate) const PROBE: &str = "/.codelia-probe";

/// Entries of `/proc` that commands see next to their processes: what common programs read. The
/// rest tells about the host, or is of use only to its administrator.
pub(crate) const SHOWN_IN_PROC: [&str; 15] = [
    "cgroups",
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "mounts",
    "net",
    "self",
    "stat",
    "swaps",
    "sys",
    "sysvipc",
    "thread-self",
    "uptime",
    "version",
];

/// Refuses a plan that is not for this mode or does not isolate.
/// With `watches`, limits may be watched instead of enforced, and the CPU rate not at all.
pub(crate) fn require_isolating(plan: &Plan, mode: Mode, watches: bool) -> Result<(), Error> {
    let own = process::own_uid();
    let checks = [
        ("mode", plan.mode == mode),
        // A command is never root on the host, and only root can run it as another user.
        ("ids", plan.ids.is_some_and(|ids| ids.uid != 0 && (own == 0 || ids.uid == own))),
        ("hostname", plan.hostname.is_some()),
        ("network", (plan.network == NetworkMode::Proxy) == plan.egress.is_some()),
        ("security", plan.security.is_some()),
        ("limits", holds_limits(plan, watches)),
    ];
    require(&checks)
}

fn holds_limits(plan: &Plan, watches: bool) -> bool {
    let watchable = [Limit::MemoryBytes, Limit::Pids, Limit::CpuTime];
    if watches {
        plan.unenforced.iter().all(|limit| *limit == Limit::CpuMillicores)
            && plan.watched.iter().all(|limit| watchable.contains(limit))
    } else {
        plan.unenforced.is_empty() && plan.watched.is_empty()
    }
}

/// Returns an error that names the first field whose check failed.
pub(crate) fn require(checks: &[(&'static str, bool)]) -> Result<(), Error> {
    match checks.iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(Error::Unenforceable { field }),
        None => Ok(()),
    }
}

/// The command's user and group on the host. Every isolating plan has them.
pub(crate) fn ids(plan: &Plan) -> Result<Ids, Error> {
    plan.ids.ok_or(Error::Unenforceable { field: "ids" })
}

/// A path as text. Tools and engines take their mounts as text.
pub(crate) fn utf8(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or(Error::Unenforceable { field: "mounts" })
}

/// How to fix a failure of `codelia-init` in any mode on the host's kernel.
pub(crate) fn init_remedy(error: &Error) -> &'static str {
    match error {
        Error::InitFailed(Failure { step: Step::SetRlimits, .. }) => {
            "start the worker with a hard limit of core dumps of at least 1 (systemd: LimitCORE=1)"
        }
        // Without a private view of the runtime, a command could watch and lock files of the host.
        Error::InitFailed(Failure { step: Step::PrivateRuntime, .. }) => {
            "use a kernel with overlayfs that ordinary users may mount (5.11 or later), with /usr on a file \
             system that it supports, at most one overlay deep"
        }
        _ => "fix what the error names; the worker's log has details",
    }
}

pub(crate) fn overlay_gap(error: &Error) -> Gap {
    Gap::new(
        format!("overlays of host directories: {error}"),
        "use a kernel that lets the worker mount overlays (5.19 or later as root, 5.11 or later for \
                 other users), with programs and temporary files on ext4, xfs or btrfs",
    )
}

pub(crate) fn executables_gap(error: &Error) -> Gap {
    Gap::new(
        format!("allow-list of executables: {error}"),
        "use a kernel with Landlock (5.13 or later, `landlock` in its lsm= list)",
    )
}

pub(crate) fn reads_gap(error: &Error) -> Gap {
    Gap::new(
        format!("reads that wait for decisions: {error}"),
        "use a kernel with Landlock (5.19 or later, `landlock` in its lsm= list)",
    )
}

pub(crate) fn egress_gap(mode: Mode, error: &Error) -> Gap {
    Gap::new(format!("network mode proxy: {error}"), egress_remedy(mode))
}
