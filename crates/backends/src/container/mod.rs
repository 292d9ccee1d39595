//! Mode `container`: one container for each sandbox, created by an engine with Docker's API.
//!
//! The image provides the programs. `codelia-init` is mounted into the container, connects to the
//! sandbox's own socket, and does the rest as in every mode.

mod control_dir;
mod engine;
mod expected;
mod mounts;
mod options;
mod orphans;
mod process;
mod restrict;
mod spec;

use std::path::Path;

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use codelia_init::Setup;
use codelia_policy::{Enforceable, Plan};
use codelia_sys::{process_id::ProcessId, rlimit::Resource};
use codelia_types::{Mode, NetworkMode, Reason};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, alias,
    isolation::{self, PROBE},
    mask::Masks,
    mounts::layout,
    probe,
    sandbox::{Sandbox, prepared, process::SandboxProcess, setup},
};
use control_dir::ControlDir;
use engine::{Engine, EngineKind};
pub use options::ContainerOptions;
use process::ContainerProcess;
use spec::EngineTarget;

/// Creates the backend of mode `container`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn container(options: ContainerOptions) -> Result<impl Backend + 'static, Error> {
    let engine = Engine::new(options.socket.clone());
    Ok(Container { engine, owner: ProcessId::current()?, options })
}

#[derive(Debug)]
struct Container {
    engine: Engine,
    /// This process. Its containers are removed by the upkeep of the next worker once it is gone.
    owner: ProcessId,
    options: ContainerOptions,
}

impl Container {
    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let plan = &*alias::hide(plan, &[]).await?;
        let kind = self.engine.kind().await?;
        let masks = Masks::resolve(&plan.mounts).await?;
        let mut control_dir = ControlDir::create(&self.options.control_dir, self.owner, plan)?;
        let target = EngineTarget { options: &self.options, kind, owner: self.owner };
        let body = spec::create_body(plan, &masks, target, &mut control_dir)?;
        let setup = self.setup(plan, kind, &body)?;
        let mut process = ContainerProcess::new(self.engine.clone(), control_dir);
        match process.start(body, plan, &self.options.init).await {
            Ok((control, group, egress)) => {
                let sandbox = Sandbox::new(control, Box::new(process), Some(group));
                prepared::prepare(sandbox, plan, setup, None, egress).await
            }
            Err(error) => {
                process.remove().await;
                Err(self.explain(error, plan))
            }
        }
    }

    /// Adapts the setup: a runtime with its own kernel passes no descriptors out.
    fn setup(
        &self,
        plan: &Plan,
        kind: EngineKind,
        body: &ContainerCreateBody,
    ) -> Result<Setup, Error> {
        let mut setup = Setup { stay_after_exit: true, ..setup::for_plan(plan)? };
        if let Some(security) = &mut setup.security {
            setup.relay_launch = plan.has_own_kernel();
            expected::adapt(&mut security.expected, plan, kind, body)?;
        }
        if setup.relay_launch {
            // Such a kernel only estimates CPU time, which the control group counts, and does not
            // share its signals and queues with the host.
            let is_set = |resource| {
                matches!(resource, Resource::OpenFiles | Resource::CoreBytes | Resource::FileBytes)
            };
            setup.rlimits.retain(|limit| is_set(limit.resource));
        }
        Ok(setup)
    }

    /// Turns a missing image into a refusal that names it.
    fn explain(&self, error: Error, plan: &Plan) -> Error {
        match &error {
            Error::Engine { message, .. } if is_image_missing(message) => {
                let image = self.options.image(plan).unwrap_or_default();
                let message =
                    format!("the worker's container engine does not have the image {image:?}");
                Error::refused(Reason::ImageMissing, message)
            }
            _ => error,
        }
    }

    /// Runs a trivial command through a whole sandbox.
    async fn try_sandbox(
        &self,
        host: Enforceable,
        only_executable: Option<&Path>,
    ) -> Result<(), Error> {
        let plan =
            probe::isolated_plan(Mode::Container, &self.options.init, host, only_executable)?;
        probe::run(self.create(&plan).await?, Path::new(PROBE)).await
    }

    /// Runs a trivial command in network mode `proxy`.
    async fn try_egress(&self, host: Enforceable) -> Result<(), Error> {
        let plan = probe::egress_plan(Mode::Container, &self.options.init, host)?;
        require_network(&plan)?;
        probe::run(self.create(&plan).await?, Path::new(PROBE)).await
    }

    fn gap(&self, error: &Error) -> Gap {
        let ContainerOptions { image, socket, .. } = &self.options;
        let remedy = match error {
            Error::EngineMissing { .. } => format!(
                "start Docker or Podman and give the worker's user access to {}, or set sandbox.container_socket",
                socket.display()
            ),
            Error::Refused(_) => format!(
                "build it (docker build -t {image} deploy/docker/base), or set sandbox.container_image to an \
                 image that the engine has"
            ),
            Error::Engine { message, .. } if message.contains("runtime") => {
                "register the runtime with the engine, or set sandbox.container_runtime".to_owned()
            }
            _ => "run codelia-init manually in a container of this engine to see what it lacks"
                .to_owned(),
        };
        Gap::new(error.to_string(), remedy)
    }
}

/// Only root can set up the network of a container, from outside, and a runtime with its own kernel
/// has none there.
fn require_network(plan: &Plan) -> Result<(), Error> {
    let holds = match plan.network {
        NetworkMode::None => true,
        NetworkMode::Proxy => restrict::is_possible() && !plan.has_own_kernel(),
        NetworkMode::Host => !plan.has_own_kernel(),
    };
    isolation::require(&[("network", holds)])
}

fn cgroup_namespace_gap() -> Gap {
    Gap::new(
        "cgroup namespaces: commands see the name of their control group on the host",
        "boot with cgroup v2, or use Docker",
    )
}

fn mounts_gap() -> Gap {
    Gap::new(
        "nosuid and nodev on the mounts of a container",
        "run the worker as root: engines have no option for it",
    )
}

fn violations_gap(error: &Error) -> Gap {
    Gap::new(
        format!("reports of blocked system calls (they are still denied): {error}"),
        "use a runtime that runs on the host's kernel (runc) if you need the reports",
    )
}

fn is_image_missing(message: &str) -> bool {
    let message = message.to_lowercase();
    message.contains("no such image") || message.contains("image not known")
}

#[async_trait]
impl Backend for Container {
    fn mode(&self) -> Mode {
        Mode::Container
    }

    async fn probe(&self) -> Capabilities {
        let mut gaps = Vec::new();
        let capabilities = |usable, enforceable, gaps| Capabilities {
            mode: Mode::Container,
            usable,
            enforceable,
            gaps,
        };
        let limits = match self.engine.limits(&mut gaps).await {
            Ok(limits) => limits,
            Err(error) => {
                return capabilities(false, Enforceable::default(), vec![self.gap(&error)]);
            }
        };
        if self.engine.kind().await.is_ok_and(EngineKind::lacks_cgroup_namespaces) {
            gaps.push(cgroup_namespace_gap());
        }
        if !restrict::is_possible() {
            gaps.push(mounts_gap());
        }
        let limits = Enforceable { violations: true, ..limits };
        let limits = match self.try_sandbox(limits, None).await {
            Ok(()) => limits,
            Err(error) => {
                let without = Enforceable { violations: false, ..limits };
                if !matches!(error, Error::InitFailed(_))
                    || self.try_sandbox(without, None).await.is_err()
                {
                    gaps.push(self.gap(&error));
                    return capabilities(false, without, gaps);
                }
                gaps.push(violations_gap(&error));
                without
            }
        };
        let executables = self.try_sandbox(limits, Some(Path::new(PROBE))).await;
        let executables = probe::is_possible(executables, &mut gaps, isolation::executables_gap);
        let egress = probe::is_possible(self.try_egress(limits).await, &mut gaps, |error| {
            isolation::egress_gap(Mode::Container, error)
        });
        // On another kernel, the mounts of a container cannot be changed from outside.
        let layouts = restrict::is_possible() && limits.violations;
        let enforceable =
            Enforceable { network: true, egress, syscalls: true, executables, layouts, ..limits };
        // Without limits it would refuse every run.
        capabilities(limits.limits(), enforceable, gaps)
    }

    async fn upkeep(&self) -> Result<usize, Error> {
        let removed = orphans::remove_containers(&self.engine).await?;
        Ok(removed + orphans::remove_directories(&self.options.control_dir)?)
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        isolation::require_isolating(plan, Mode::Container, false)?;
        require_network(plan)?;
        layout::create_directories(plan)?;
        self.create(plan).await
    }
}
