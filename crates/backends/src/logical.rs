//! Mode `logical`: own directory, clean environment, limits, process-tree kill. For development;
//! it isolates nothing.

use std::{collections::BTreeMap, path::PathBuf};

use async_trait::async_trait;
use codelia_policy::{CommandSpec, Enforceable, Limits, Mode, NetworkMode, Outcome, Plan, RunId, SessionId};
use codelia_sys::{
    cgroup::{self, Controller, Group, Hierarchy},
    directory,
};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, Stdio, control::Control, init, prepared::WaitingSandbox,
    sandbox::Sandbox,
};

/// What the mode needs to know.
#[derive(Debug, Clone)]
pub struct LogicalOptions {
    /// Path of `codelia-init`.
    pub init: PathBuf,
    /// The control group below which those of sandboxes are made, the same in each hierarchy;
    /// else the worker's own. In version 2 it must have no processes of its own.
    pub cgroup_parent: Option<String>,
}

/// Mode `logical`.
#[derive(Debug)]
pub struct Logical {
    init: PathBuf,
    hierarchy: Hierarchy,
}

impl Logical {
    /// Looks for the control groups of this host.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn new(options: LogicalOptions) -> Result<Self, Error> {
        let parent = options.cgroup_parent.as_ref().map(std::path::Path::new);
        Ok(Self { init: options.init, hierarchy: Hierarchy::detect(parent)? })
    }

    fn create_group(&self, plan: &Plan) -> Result<Option<Group>, Error> {
        let limits = group_limits(plan);
        if limits == cgroup::Limits::default() {
            return Ok(None);
        }
        Ok(Some(Group::create(&self.hierarchy, &format!("codelia-{}", plan.sandbox), limits)?))
    }

    /// From here on the sandbox takes itself down.
    fn start(&self, mut group: Option<Group>) -> Result<Sandbox, Error> {
        let started =
            Control::pair().and_then(|(control, there)| Ok((control, init::start(&self.init, there)?)));
        match started {
            Ok((control, init)) => Ok(Sandbox::new(control, init, group)),
            Err(error) => {
                group.as_mut().map(Group::remove).transpose()?;
                Err(error)
            }
        }
    }

    /// Which controllers can limit, found by limiting an empty group.
    fn try_controllers(&self, gaps: &mut Vec<Gap>) -> Enforceable {
        let mut can = |controller| match self.try_controller(controller) {
            Ok(()) => true,
            Err(error) => {
                gaps.push(controller_gap(controller, &error));
                false
            }
        };
        let [memory, pids, cpu] = Controller::LIMITING.map(&mut can);
        Enforceable { memory, cpu, pids, network: false }
    }

    fn try_controller(&self, controller: Controller) -> Result<(), codelia_sys::Error> {
        let name = format!("codelia-probe-{}", RunId::generate());
        Group::create(&self.hierarchy, &name, smallest_limit(controller))?.remove()
    }

    /// Runs a command that does nothing through a whole sandbox.
    async fn try_sandbox(&self, enforceable: Enforceable) -> Result<(), Error> {
        let command = idle_command(&self.init);
        let prepared = self.prepare(&idle_plan(enforceable)).await?;
        let mut running = prepared.launch(&command, null_stdio()?).await?.running;
        let (outcome, _) = running.wait().await;
        let receipt = running.destroy().await;
        if outcome == Outcome::Exited(0) && receipt.is_clean() { Ok(()) } else { Err(Error::InitEnded) }
    }
}

#[async_trait]
impl Backend for Logical {
    fn mode(&self) -> Mode {
        Mode::Logical
    }

    async fn probe(&self) -> Capabilities {
        let mut gaps = vec![Gap {
            missing: "isolation".to_owned(),
            remedy: "mode logical isolates nothing; choose another where it matters".to_owned(),
        }];
        let enforceable = self.try_controllers(&mut gaps);
        let tried = self.try_sandbox(enforceable).await;
        if let Err(error) = &tried {
            gaps.push(Gap {
                missing: format!("a working sandbox: {error}"),
                remedy: "run codelia doctor".to_owned(),
            });
        }
        Capabilities { mode: Mode::Logical, usable: tried.is_ok(), enforceable, gaps }
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        refuse_what_is_not_logical(plan)?;
        let root =
            directory::open(&plan.root).map_err(|errno| Error::Root { path: plan.root.clone(), errno })?;
        let mut sandbox = self.start(self.create_group(plan)?)?;
        if let Err(error) = sandbox.set_up().await {
            sandbox.destroy().await;
            return Err(error);
        }
        Ok(Box::new(WaitingSandbox {
            sandbox,
            root,
            env: plan.env.clone(),
            open_files: plan.limits.open_files,
        }))
    }
}

fn refuse_what_is_not_logical(plan: &Plan) -> Result<(), Error> {
    let checks = [
        ("mode", plan.mode == Mode::Logical),
        ("mounts", plan.mounts.is_empty()),
        ("ids", plan.ids.is_none()),
        ("hostname", plan.hostname.is_none()),
        ("network", plan.network == NetworkMode::Host),
        ("security", plan.security.is_none()),
    ];
    match checks.into_iter().find(|(_, holds)| !holds) {
        Some((field, _)) => Err(Error::Unenforceable { field }),
        None => Ok(()),
    }
}

/// The limits that the plan holds its command to, and only those.
fn group_limits(plan: &Plan) -> cgroup::Limits {
    let enforced = |field: &str, value| (!plan.unenforced.iter().any(|name| name == field)).then_some(value);
    cgroup::Limits {
        memory_bytes: enforced("limits.memory_bytes", plan.limits.memory_bytes),
        // codelia-init counts too.
        pids: enforced("limits.pids", plan.limits.pids.saturating_add(1)),
        cpu_millis: enforced("limits.cpu_millis", plan.limits.cpu_millis),
    }
}

fn smallest_limit(controller: Controller) -> cgroup::Limits {
    let limits = cgroup::Limits::default();
    match controller {
        Controller::Memory => cgroup::Limits { memory_bytes: Some(1 << 20), ..limits },
        Controller::Pids => cgroup::Limits { pids: Some(1), ..limits },
        Controller::Cpu => cgroup::Limits { cpu_millis: Some(1), ..limits },
        Controller::CpuTime => limits,
    }
}

fn controller_gap(controller: Controller, error: &codelia_sys::Error) -> Gap {
    Gap {
        missing: format!("limits by the {} controller: {error}", controller.as_str()),
        remedy: "give the worker a delegated control group without processes of its own".to_owned(),
    }
}

fn idle_plan(host: Enforceable) -> Plan {
    let limits =
        [("limits.memory_bytes", host.memory), ("limits.cpu_millis", host.cpu), ("limits.pids", host.pids)];
    Plan {
        sandbox: RunId::generate(),
        session: SessionId::generate(),
        mode: Mode::Logical,
        root: PathBuf::from("/"),
        workspace: PathBuf::from("/"),
        mounts: Vec::new(),
        ids: None,
        env: BTreeMap::new(),
        hostname: None,
        limits: Limits::default(),
        unenforced: limits.into_iter().filter(|(_, can)| !can).map(|(name, _)| name.to_owned()).collect(),
        network: NetworkMode::Host,
        security: None,
    }
}

fn idle_command(init: &std::path::Path) -> CommandSpec {
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
