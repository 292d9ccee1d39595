//! The probe's sandbox: it runs a trivial command to find out whether a mode works on this host.

use std::{
    io,
    path::{Path, PathBuf},
};

use codelia_policy::{
    EgressRules, Enforceable, HostInfo, Ids, Mount, NetworkPolicy, Plan, PlanError, PlanTarget,
    RunSpec,
};
use codelia_sys::{fd, process};
use codelia_types::{CommandSpec, Mode, NetworkMode, Outcome, RunId, SessionId};

use crate::{Error, Gap, Prepared, Stdio, isolation::PROBE};

/// User ids of probes start here. Nothing else uses ids this high.
const FIRST_PROBE_UID: u32 = 0x7000_0000;

/// The largest process id that Linux assigns.
const MAX_PID: u32 = 4 * 1024 * 1024;

const MIB: u64 = 1024 * 1024;

/// The user of a probe by a worker that is root: unprivileged, without files, and different for
/// each worker process, so that concurrent probes do not interfere.
fn probe_ids() -> Ids {
    let id = FIRST_PROBE_UID + std::process::id();
    Ids { uid: id, gid: id }
}

/// Whether only probes run as this user.
pub(crate) fn is_probe_uid(uid: u32) -> bool {
    (FIRST_PROBE_UID..=FIRST_PROBE_UID + MAX_PID).contains(&uid)
}

fn target() -> PlanTarget {
    let root = PathBuf::from("/");
    PlanTarget { sandbox: RunId::generate(), session: SessionId::generate(), root }
}

fn refusal(error: PlanError) -> Error {
    Error::Unenforceable { field: error.field }
}

/// A plan of mode `logical` with the limits that this host can enforce.
pub(crate) fn logical_plan(host: Enforceable) -> Result<Plan, Error> {
    Plan::logical(target(), &RunSpec::new(CommandSpec::default(), Mode::Logical), host)
        .map_err(refusal)
}

/// An isolated plan with the default policy, in which `codelia-init` can be executed as a command.
/// With `only_executable` nothing but the program at this path may be executed.
pub(crate) fn isolated_plan(
    mode: Mode,
    init: &Path,
    host: Enforceable,
    only_executable: Option<&Path>,
) -> Result<Plan, Error> {
    let own = Ids { uid: process::own_uid(), gid: process::own_gid() };
    let mut spec = RunSpec::new(CommandSpec::default(), mode);
    spec.policy.process.allowed_executables = only_executable.map(|path| vec![path.to_owned()]);
    let enforceable = Enforceable { violations: host.violations, ..Enforceable::EVERYTHING };
    let assumed = HostInfo { enforceable, ..HostInfo::default() };
    let ids = if own.uid == 0 { probe_ids() } else { own };
    let plan = Plan::isolated(target(), &spec, &assumed, ids).map_err(refusal)?;
    let mut mounts = vec![
        Mount::Bind { source: init.to_owned(), target: PROBE.into(), writable: false },
        Mount::Proc,
        Mount::Dev,
        Mount::Tmpfs { target: "/tmp".into(), size_bytes: MIB },
    ];
    // A container has the runtime of its image.
    if mode != Mode::Container {
        mounts.push(Mount::Runtime { path: "/usr".into() });
    }
    // A host may lack any of them.
    let unenforced = logical_plan(host)?.unenforced;
    Ok(Plan { workspace: "/tmp".into(), mounts, unenforced, ..plan })
}

/// An isolated plan in network mode `proxy`.
pub(crate) fn egress_plan(mode: Mode, init: &Path, host: Enforceable) -> Result<Plan, Error> {
    let plan = isolated_plan(mode, init, host, None)?;
    let egress = Some(EgressRules::from_policy(&NetworkPolicy::default()));
    Ok(Plan { network: NetworkMode::Proxy, egress, ..plan })
}

/// An isolated plan with reads that wait for decisions.
pub(crate) fn reads_plan(mode: Mode, init: &Path, host: Enforceable) -> Result<Plan, Error> {
    let mut plan = isolated_plan(mode, init, host, None)?;
    plan.mounts.push(Mount::Tmpfs { target: "/run".into(), size_bytes: MIB });
    if let Some(security) = &mut plan.security {
        security.asked_reads = vec!["/run".into()];
    }
    Ok(plan)
}

/// Whether an optional part of a plan could be tried. Otherwise adds what is missing.
pub(crate) fn is_possible(
    tried: Result<(), Error>,
    gaps: &mut Vec<Gap>,
    gap: impl FnOnce(&Error) -> Gap,
) -> bool {
    if let Err(error) = &tried {
        gaps.push(gap(error));
    }
    tried.is_ok()
}

/// Runs `codelia-init --version`, which needs nothing else.
pub(crate) async fn run(prepared: Box<dyn Prepared>, init: &Path) -> Result<(), Error> {
    let command = CommandSpec::new([init.display().to_string(), "--version".to_owned()]);
    let mut running = prepared.launch(&command, null_stdio()?).await?.running;
    let (outcome, _) = running.wait().await;
    let receipt = running.destroy().await;
    if outcome == Outcome::Exited(0) && receipt.is_clean() {
        Ok(())
    } else {
        Err(Error::InitExited)
    }
}

/// The gap of a host on which the probe's sandbox failed.
pub(crate) fn sandbox_gap(error: &Error, remedy: &str) -> Gap {
    Gap::new(format!("a working sandbox: {error}"), remedy)
}

fn null_stdio() -> Result<Stdio, Error> {
    let null = || fd::dev_null().map_err(io::Error::from);
    Ok(Stdio::Files { stdin: null()?, stdout: null()?, stderr: null()? })
}
