//! The probe's sandbox: it runs a trivial command to find out whether a mode works on this host.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use codelia_policy::{
    EgressRules, Enforceable, HostInfo, Ids, IoLimits, Limit, Limits, LimitsRequest, Mount, NetworkPolicy,
    Plan, PlanTarget, Policy, RunSpec,
};
use codelia_sys::process;
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

/// A plan with the limits that this host can enforce and nothing else.
pub(crate) fn plan(mode: Mode, host: Enforceable) -> Plan {
    let limits =
        [(Limit::MemoryBytes, host.memory), (Limit::CpuMillicores, host.cpu), (Limit::Pids, host.pids)];
    Plan {
        sandbox: RunId::generate(),
        session: SessionId::generate(),
        mode,
        root: PathBuf::from("/"),
        workspace: PathBuf::from("/"),
        mounts: Vec::new(),
        ids: None,
        env: BTreeMap::new(),
        hostname: None,
        limits: Limits::default(),
        unenforced: limits.into_iter().filter(|(_, can)| !can).map(|(limit, _)| limit).collect(),
        watched: Vec::new(),
        io: IoLimits::default(),
        cpus: None,
        profile: None,
        network: NetworkMode::Host,
        egress: None,
        security: None,
    }
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
    let mut spec = RunSpec {
        command: CommandSpec::default(),
        mode,
        network: None,
        limits: Limits::default(),
        requested_limits: LimitsRequest::default(),
        policy: Policy::default(),
        ends_with_caller: false,
        tool: None,
        transaction: None,
    };
    spec.policy.process.allowed_executables = only_executable.map(|path| vec![path.to_owned()]);
    let enforceable = Enforceable { violations: host.violations, ..Enforceable::EVERYTHING };
    let assumed = HostInfo { enforceable, ..HostInfo::default() };
    let ids = if own.uid == 0 { probe_ids() } else { own };
    let base = plan(mode, host);
    let target = PlanTarget { sandbox: base.sandbox, session: base.session, root: base.root };
    let plan = Plan::isolated(target, &spec, &assumed, ids)
        .map_err(|error| Error::Unenforceable { field: error.field })?;
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
    Ok(Plan { workspace: "/tmp".into(), mounts, unenforced: base.unenforced, ..plan })
}

/// The same in network mode `proxy`.
pub(crate) fn egress_plan(mode: Mode, init: &Path, host: Enforceable) -> Result<Plan, Error> {
    let plan = isolated_plan(mode, init, host, None)?;
    let egress = Some(EgressRules::from_policy(&NetworkPolicy::default()));
    Ok(Plan { network: NetworkMode::Proxy, egress, ..plan })
}

/// The same with reads that wait for decisions.
pub(crate) fn reads_plan(mode: Mode, init: &Path, host: Enforceable) -> Result<Plan, Error> {
    let mut plan = isolated_plan(mode, init, host, None)?;
    plan.mounts.push(Mount::Tmpfs { target: "/run".into(), size_bytes: MIB });
    if let Some(security) = &mut plan.security {
        security.asked_reads = vec!["/run".into()];
    }
    Ok(plan)
}

/// Runs `codelia-init --version`, which needs nothing else.
pub(crate) async fn run(prepared: Box<dyn Prepared>, init: &Path) -> Result<(), Error> {
    let command = CommandSpec::new([init.display().to_string(), "--version".to_owned()]);
    let mut running = prepared.launch(&command, null_stdio()?).await?.running;
    let (outcome, _) = running.wait().await;
    let receipt = running.destroy().await;
    if outcome == Outcome::Exited(0) && receipt.is_clean() { Ok(()) } else { Err(Error::InitExited) }
}

/// The gap of a host on which the probe's sandbox failed.
pub(crate) fn sandbox_gap(error: &Error, remedy: String) -> Gap {
    Gap { missing: format!("a working sandbox: {error}"), remedy }
}

fn null_stdio() -> Result<Stdio, Error> {
    let null = || std::fs::File::options().read(true).write(true).open("/dev/null").map(Into::into);
    Ok(Stdio::Files { stdin: null()?, stdout: null()?, stderr: null()? })
}
