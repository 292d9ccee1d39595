//! Mode `logical`: own directory, clean environment, limits, process-tree kill. For development;
//! it isolates nothing.

use std::path::PathBuf;

use async_trait::async_trait;
use codelia_policy::{Enforceable, Plan};
use codelia_sys::{
    cgroup::{CgroupParent, Group},
    resolve_beneath,
};
use codelia_types::{Mode, NetworkMode};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, init, probe, sandbox::control::Control,
    sandbox::groups::Groups, sandbox::prepared, sandbox::sandbox::Sandbox,
    sandbox::sandbox_process::BareInit, sandbox::setup,
};

/// What the mode needs to know.
#[derive(Debug, Clone)]
pub struct LogicalOptions {
    /// Path of `codelia-init`.
    pub init: PathBuf,
    /// Where the control groups of sandboxes are created.
    pub cgroup_parent: CgroupParent,
}

/// Mode `logical`.
#[derive(Debug)]
pub struct Logical {
    init: PathBuf,
    groups: Groups,
}

impl Logical {
    /// Looks for the control groups of this host.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn new(options: LogicalOptions) -> Result<Self, Error> {
        Ok(Self { init: options.init, groups: Groups::detect(&options.cgroup_parent)? })
    }

    /// From here on the sandbox takes itself down.
    fn start(&self, mut group: Option<Group>) -> Result<Sandbox, Error> {
        let started =
            Control::pair().and_then(|(control, there)| Ok((control, init::start(&self.init, &[], there)?)));
        match started {
            Ok((control, init)) => Ok(Sandbox::new(control, Box::new(BareInit(init)), group)),
            Err(error) => {
                group.as_mut().map(Group::remove).transpose()?;
                Err(error)
            }
        }
    }

    /// Runs a command that does nothing through a whole sandbox.
    async fn try_sandbox(&self, host: Enforceable) -> Result<(), Error> {
        let prepared = self.prepare(&probe::plan(Mode::Logical, host)).await?;
        probe::run(prepared, &self.init).await
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
        let enforceable = self.groups.probe(&mut gaps);
        let tried = self.try_sandbox(enforceable).await;
        if let Err(error) = &tried {
            gaps.push(Gap {
                missing: format!("a working sandbox: {error}"),
                remedy: "run codelia doctor".to_owned(),
            });
        }
        Capabilities { mode: Mode::Logical, usable: tried.is_ok(), enforceable, gaps }
    }

    async fn sweep(&self) -> Result<usize, Error> {
        self.groups.remove_orphans()
    }

    fn shutdown(&self) {
        self.groups.leave();
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        refuse_what_is_not_logical(plan)?;
        let root = resolve_beneath::open_directory(&plan.root)
            .map_err(|errno| Error::Root { path: plan.root.clone(), errno })?;
        let sandbox = self.start(self.groups.create(plan)?)?;
        prepared::prepare(sandbox, plan, setup::of(plan)?, Some(root)).await
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
