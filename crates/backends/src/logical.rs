//! Mode `logical`: separate directory, clean environment, limits, process-tree kill. For
//! development; it isolates nothing.

use std::path::PathBuf;

use async_trait::async_trait;
use codelia_policy::{Enforceable, Plan, limits_remedy};
use codelia_sys::{cgroup::CgroupParent, resolve_beneath};
use codelia_types::{Mode, NetworkMode};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, init_binary, isolation, probe,
    sandbox::{Sandbox, cgroups::Cgroups, prepared, process::InitProcess, setup},
};

/// Configuration of mode `logical`.
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
    cgroups: Cgroups,
}

impl Logical {
    /// Detects the control groups of this host.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn new(options: LogicalOptions) -> Result<Self, Error> {
        Ok(Self { init: options.init, cgroups: Cgroups::detect(&options.cgroup_parent)? })
    }

    /// Runs a trivial command through a whole sandbox.
    async fn try_sandbox(&self, host: Enforceable) -> Result<(), Error> {
        let prepared = self.prepare(&probe::logical_plan(host)?).await?;
        probe::run(prepared, &self.init).await
    }
}

#[async_trait]
impl Backend for Logical {
    fn mode(&self) -> Mode {
        Mode::Logical
    }

    async fn probe(&self) -> Capabilities {
        let mut gaps = vec![Gap::new(
            "isolation",
            "mode logical isolates nothing; use another mode for untrusted commands",
        )];
        let enforceable = self.cgroups.probe(limits_remedy(Mode::Logical, false), &mut gaps);
        let usable = probe::is_possible(self.try_sandbox(enforceable).await, &mut gaps, |error| {
            probe::sandbox_gap(error, "check that codelia-init can be executed")
        });
        Capabilities { mode: Mode::Logical, usable, enforceable, gaps }
    }

    async fn upkeep(&self) -> Result<usize, Error> {
        self.cgroups.remove_orphans()
    }

    fn shutdown(&self) {
        self.cgroups.shutdown();
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        require_logical(plan)?;
        let root = resolve_beneath::open_directory(&plan.root)
            .map_err(|errno| Error::Root { path: plan.root.clone(), errno })?;
        let group = self.cgroups.create(plan)?;
        let sandbox = Sandbox::start(group, |remote| {
            Ok(InitProcess(init_binary::start(&self.init, &[], remote)?))
        })?;
        prepared::prepare(sandbox, plan, setup::for_plan(plan)?, Some(root), None).await
    }
}

/// Refuses a plan that expects isolation.
fn require_logical(plan: &Plan) -> Result<(), Error> {
    isolation::require(&[
        ("mode", plan.mode == Mode::Logical),
        ("mounts", plan.mounts.is_empty()),
        ("ids", plan.ids.is_none()),
        ("hostname", plan.hostname.is_none()),
        ("network", plan.network == NetworkMode::Host),
        ("security", plan.security.is_none()),
    ])
}
