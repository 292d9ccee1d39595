//! The probe's sandbox: it runs a trivial command to find out whether a mode works on this host.

use std::{
    collections::BTreeMap,
    env,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use codelia_policy::{
    EgressRules, Enforceable, HostInfo, Ids, IoLimits, Limit, Limits, Mount, NetworkPolicy, Plan,
    PlanTarget, RunSpec, limits_remedy,
};
use codelia_sys::process;
use codelia_types::{CommandSpec, Mode, NetworkMode, Outcome, RunId, SessionId};

use crate::{
    Capabilities, Error, Gap, Prepared, Stdio,
    isolation::{self, PROBE},
    mounts::overlay,
    sandbox::cgroups::Cgroups,
};

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
    let limits = [
        (Limit::MemoryBytes, host.memory),
        (Limit::CpuMillicores, host.cpu),
        (Limit::Pids, host.pids),
    ];
    Plan {
        sandbox: RunId::generate(),
        session: SessionId::generate(),
        mode,
        root: PathBuf::from("/"),
        workspace: PathBuf::from("/"),
        mounts: Vec::new(),
        layout: None,
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
    let mut spec = RunSpec::new(CommandSpec::default(), mode);
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

/// A mode on the host's kernel, as the probe tries it.
#[async_trait]
pub(crate) trait Probed: Sync {
    const MODE: Mode;

    /// Path of `codelia-init`.
    fn init(&self) -> &Path;

    /// Creates a sandbox.
    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error>;

    /// What is missing if no sandbox can be created.
    fn gap(&self, error: &Error) -> Gap;
}

/// Tries everything that a plan may need: limits, a whole sandbox, and its optional parts.
pub(crate) async fn capabilities<P: Probed>(
    mode: &P,
    cgroups: &Cgroups,
    watch_limits: bool,
) -> Capabilities {
    let mut gaps = Vec::new();
    let limits = cgroups.probe(limits_remedy(P::MODE, watch_limits), &mut gaps);
    let limits = Enforceable { violations: true, watches: watch_limits, ..limits };
    let plan = |only| isolated_plan(P::MODE, mode.init(), limits, only);
    if let Err(error) = try_plan(mode, plan(None)).await {
        gaps.push(mode.gap(&error));
        return Capabilities { mode: P::MODE, usable: false, enforceable: limits, gaps };
    }
    let mut is_possible = |tried: Result<(), Error>, gap: &dyn Fn(&Error) -> Gap| match tried {
        Ok(()) => true,
        Err(error) => {
            gaps.push(gap(&error));
            false
        }
    };
    let tried = try_plan(mode, plan(Some(Path::new(PROBE)))).await;
    let executables = is_possible(tried, &isolation::executables_gap);
    let tried = try_plan(mode, egress_plan(P::MODE, mode.init(), limits)).await;
    let egress = is_possible(tried, &|error| isolation::egress_gap(P::MODE, error));
    let overlays = is_possible(try_overlay(mode, plan(None)).await, &isolation::overlay_gap);
    let tried = try_plan(mode, reads_plan(P::MODE, mode.init(), limits)).await;
    let asked_reads = is_possible(tried, &isolation::reads_gap);
    let network = true;
    let enforceable = Enforceable {
        network,
        egress,
        syscalls: true,
        executables,
        asked_reads,
        layouts: true,
        overlays,
        ..limits
    };
    // Without limits it would refuse every run.
    let usable = limits.limits() || watch_limits;
    Capabilities { mode: P::MODE, usable, enforceable, gaps }
}

/// Runs a trivial command through a whole sandbox.
async fn try_plan(mode: &impl Probed, plan: Result<Plan, Error>) -> Result<(), Error> {
    run(mode.create(&plan?).await?, Path::new(PROBE)).await
}

/// The same with an overlay over `/usr`.
async fn try_overlay(mode: &impl Probed, plan: Result<Plan, Error>) -> Result<(), Error> {
    let mut plan = plan?;
    let layers = env::temp_dir().join(plan.sandbox.to_string());
    let (source, target) = ("/usr".into(), "/usr".into());
    plan.mounts.push(Mount::Overlay { source, target, layer: layers.join("usr") });
    let tried = try_plan(mode, Ok(plan)).await;
    let removed = overlay::remove_layers(&layers);
    tried.and(Ok(removed?))
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
pub(crate) fn sandbox_gap(error: &Error, remedy: String) -> Gap {
    Gap { missing: format!("a working sandbox: {error}"), remedy }
}

fn null_stdio() -> Result<Stdio, Error> {
    let null = || std::fs::File::options().read(true).write(true).open("/dev/null").map(Into::into);
    Ok(Stdio::Files { stdin: null()?, stdout: null()?, stderr: null()? })
}
