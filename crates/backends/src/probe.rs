//! The sandbox of the probe: it runs a command that does nothing.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use codelia_policy::{
    Enforceable, HostInfo, Ids, IoLimits, Limit, Limits, LimitsRequest, Mount, Plan, PlanTarget, Policy,
    RunSpec,
};
use codelia_sys::process;
use codelia_types::{CommandSpec, Mode, NetworkMode, Outcome, RunId, SessionId};

use crate::{Error, Prepared, Stdio};

/// Who has no files, for a worker that may choose: each worker another one, so that they do not meet.
fn nobody() -> Ids {
    let id = FIRST_NOBODY + std::process::id();
    Ids { uid: id, gid: id }
}

const FIRST_NOBODY: u32 = 0x7000_0000;

/// The kernel gives no process a larger id.
const MOST_PROCESSES: u32 = 4 * 1024 * 1024;

/// Whether this is somebody whom only a probe was.
pub(crate) fn is_nobody(uid: u32) -> bool {
    (FIRST_NOBODY..=FIRST_NOBODY + MOST_PROCESSES).contains(&uid)
}

const MIB: u64 = 1024 * 1024;

/// A plan with the limits that this host can enforce and nothing else.
pub(crate) fn plan(mode: Mode, host: Enforceable) -> Plan {
    let limits = [(Limit::MemoryBytes, host.memory), (Limit::CpuMillis, host.cpu), (Limit::Pids, host.pids)];
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
        io: IoLimits::default(),
        cpus: None,
        profile: None,
        network: NetworkMode::Host,
        security: None,
    }
}

/// The same isolated, with the default policy. If only it may be executed, `codelia-init` is the
/// program at this path.
pub(crate) fn isolated(mode: Mode, host: Enforceable, only: Option<&Path>) -> Result<Plan, Error> {
    let own = Ids { uid: process::own_uid(), gid: process::own_gid() };
    let mut spec = RunSpec {
        command: version(Path::new("")),
        mode,
        network: None,
        limits: Limits::default(),
        requested_limits: LimitsRequest::default(),
        policy: Policy::default(),
        ends_with_caller: false,
    };
    spec.policy.process.allowed_executables = only.map(|path| vec![path.to_owned()]);
    let enforceable = Enforceable { violations: host.violations, ..Enforceable::EVERYTHING };
    let assumed = HostInfo { enforceable, ..HostInfo::default() };
    let ids = if own.uid == 0 { nobody() } else { own };
    let less = plan(mode, host);
    let plan = Plan::isolated(
        PlanTarget { sandbox: less.sandbox, session: less.session, root: less.root },
        &spec,
        &assumed,
        ids,
    )
    .map_err(|error| Error::Unenforceable { field: error.field })?;
    Ok(Plan {
        workspace: "/tmp".into(),
        mounts: vec![Mount::Proc, Mount::Dev, Mount::Tmpfs { target: "/tmp".into(), size_bytes: MIB }],
        unenforced: less.unenforced,
        ..plan
    })
}

/// Runs `codelia-init`, which is there in every sandbox, for its version.
pub(crate) async fn run(prepared: Box<dyn Prepared>, init: &Path) -> Result<(), Error> {
    let mut running = prepared.launch(&version(init), null_stdio()?).await?.running;
    let (outcome, _) = running.wait().await;
    let receipt = running.destroy().await;
    if outcome == Outcome::Exited(0) && receipt.is_clean() { Ok(()) } else { Err(Error::InitEnded) }
}

fn version(init: &Path) -> CommandSpec {
    CommandSpec {
        argv: vec![init.display().to_string(), "--version".to_owned()],
        env: BTreeMap::new(),
        working_directory: String::new(),
        terminal: None,
        stdin: false,
    }
}

fn null_stdio() -> Result<Stdio, Error> {
    let null = || std::fs::File::options().read(true).write(true).open("/dev/null").map(Into::into);
    Ok(Stdio { stdin: null()?, stdout: null()?, stderr: null()? })
}
