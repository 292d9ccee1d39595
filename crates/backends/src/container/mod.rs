//! Mode `container`: a container for each sandbox, made by an engine that speaks Docker's API. The image
//! brings the programs; `codelia-init` comes in by a mount, is connected to over a socket of the sandbox's
//! own, and does the rest as in every mode.

mod channel;
mod container_process;
mod engine;
mod spec;
mod sweep;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use codelia_init::Setup;
use codelia_policy::{Enforceable, Plan};
use codelia_sys::{process_id::ProcessId, rlimit::Resource};
use codelia_types::{Mode, Reason};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, probe,
    sandbox::prepared,
    sandbox::setup,
    tool::tool_backend::{self, INIT},
};
use channel::Channel;
use container_process::Holder;
use engine::{Engine, Family};

/// What the mode needs to know.
#[derive(Debug, Clone)]
pub struct ContainerOptions {
    /// Path of `codelia-init`, as the engine sees it.
    pub init: PathBuf,
    /// The engine's socket.
    pub socket: PathBuf,
    /// The engine's name for the runtime that makes the containers; `None` for its default.
    pub runtime: Option<String>,
    /// The image that brings the programs.
    pub image: String,
    /// The images of profiles, by name. The profile `base` is the image above if it is not here.
    pub profile_images: BTreeMap<String, String>,
    /// Where each sandbox gets a directory for its control socket, as the engine sees it too.
    pub control_dir: PathBuf,
    /// Whose the containers are, for whoever lists them.
    pub worker: String,
}

impl ContainerOptions {
    /// The image of a plan.
    fn image(&self, plan: &Plan) -> Result<&str, Error> {
        let Some(profile) = &plan.profile else { return Ok(&self.image) };
        match self.profile_images.get(profile) {
            Some(image) => Ok(image),
            None if profile == "base" => Ok(&self.image),
            None => Err(Error::Unenforceable { field: "policy.container.profile" }),
        }
    }
}

/// Mode `container`.
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
    owner: ProcessId,
    options: ContainerOptions,
}

impl Container {
    async fn carry_out(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let family = self.engine.family().await?;
        let setup = self.setup(plan, family)?;
        let mut channel = Channel::open(&self.options.control_dir, self.owner, plan)?;
        let body = spec::container(plan, &self.options, family, self.owner, &mut channel)?;
        // From here on the container takes itself down.
        let mut holder = Holder::new(self.engine.clone(), channel);
        match holder.start(body, plan).await {
            Ok((control, group)) => {
                let sandbox = crate::sandbox::sandbox::Sandbox::new(control, Box::new(holder), Some(group));
                prepared::prepare(sandbox, plan, setup, None).await
            }
            Err(error) => {
                crate::sandbox::sandbox_process::Holder::remove(&mut holder).await;
                Err(self.explain(error, plan))
            }
        }
    }

    /// The engine gives a container no user ids of its own. A runtime with a kernel of its own, which tells
    /// nobody of system calls, lets no descriptor out either, and its namespaces are not numbered by ours.
    fn setup(&self, plan: &Plan, family: Family) -> Result<Setup, Error> {
        let mut setup = Setup { stay_after_exit: true, ..setup::of(plan)? };
        let ids = tool_backend::ids(plan)?;
        if let Some(security) = &mut setup.security {
            setup.relay_launch = spec::has_own_kernel(plan);
            let expected = &mut security.expected;
            let shared = |name: &str| name == "user" || name == "cgroup" && family.lacks_cgroup_namespaces();
            expected.host_namespaces.retain(|name, _| !setup.relay_launch && !shared(name));
            (expected.uid, expected.gid) = (ids.uid, ids.gid);
        }
        if setup.relay_launch {
            // Such a kernel guesses how long a process has run. The group counts it.
            setup.rlimits.retain(|limit| limit.resource != Resource::CpuSeconds);
        }
        Ok(setup)
    }

    /// A run is refused for want of an image by its name, so that somebody can bring it.
    fn explain(&self, error: Error, plan: &Plan) -> Error {
        match &error {
            Error::Engine { complaint, .. } if is_image_missing(complaint) => {
                let image = self.options.image(plan).unwrap_or_default();
                Error::refused(Reason::ImageMissing, format!("the worker's engine has no image {image:?}"))
            }
            _ => error,
        }
    }

    /// Runs a command that does nothing through a whole sandbox.
    async fn try_sandbox(&self, host: Enforceable, only: Option<&Path>) -> Result<(), Error> {
        let prepared = self.carry_out(&probe::isolated(Mode::Container, host, only)?).await?;
        probe::run(prepared, Path::new(INIT)).await
    }

    fn gap(&self, error: &Error) -> Gap {
        let ContainerOptions { image, socket, .. } = &self.options;
        let remedy = match error {
            Error::EngineMissing { .. } => format!(
                "start Docker or Podman and let the worker's user use {}, or set sandbox.container_socket",
                socket.display()
            ),
            Error::Refused(_) => format!(
                "build it (docker build -t {image} deploy/docker/base), or set sandbox.container_image to one that is there"
            ),
            Error::Engine { complaint, .. } if complaint.contains("runtime") => {
                "register the runtime with the engine, or set sandbox.container_runtime".to_owned()
            }
            _ => "run codelia-init in a container of this engine by hand to see what it lacks".to_owned(),
        };
        Gap { missing: error.to_string(), remedy }
    }
}

fn no_cgroup_namespace() -> Gap {
    Gap {
        missing: "control-group namespaces: a command is told the name of its group on the host".to_owned(),
        remedy: "boot with control groups of version 2, or use Docker".to_owned(),
    }
}

fn nobody_is_told(error: &Error) -> Gap {
    Gap {
        missing: format!("events of blocked system calls, which are refused all the same: {error}"),
        remedy: "use a runtime on the host's own kernel (runc) where they are needed".to_owned(),
    }
}

fn is_image_missing(complaint: &str) -> bool {
    let complaint = complaint.to_lowercase();
    complaint.contains("no such image") || complaint.contains("image not known")
}

#[async_trait]
impl Backend for Container {
    fn mode(&self) -> Mode {
        Mode::Container
    }

    async fn probe(&self) -> Capabilities {
        let mut gaps = Vec::new();
        let found =
            |usable, enforceable, gaps| Capabilities { mode: Mode::Container, usable, enforceable, gaps };
        let limits = match self.engine.limits(&mut gaps).await {
            Ok(limits) => limits,
            Err(error) => return found(false, Enforceable::default(), vec![self.gap(&error)]),
        };
        if self.engine.family().await.is_ok_and(Family::lacks_cgroup_namespaces) {
            gaps.push(no_cgroup_namespace());
        }
        let limits = Enforceable { violations: true, ..limits };
        let limits = match self.try_sandbox(limits, None).await {
            Ok(()) => limits,
            Err(error) => {
                let less = Enforceable { violations: false, ..limits };
                if !matches!(error, Error::InitFailed(_)) || self.try_sandbox(less, None).await.is_err() {
                    gaps.push(self.gap(&error));
                    return found(false, less, gaps);
                }
                gaps.push(nobody_is_told(&error));
                less
            }
        };
        let executables = match self.try_sandbox(limits, Some(Path::new(INIT))).await {
            Ok(()) => true,
            Err(error) => {
                gaps.push(tool_backend::no_list_of_executables(&error));
                false
            }
        };
        found(true, Enforceable { network: true, syscalls: true, executables, ..limits }, gaps)
    }

    async fn sweep(&self) -> Result<usize, Error> {
        let removed = sweep::containers(&self.engine).await?;
        Ok(removed + sweep::directories(&self.options.control_dir)?)
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        tool_backend::refuse_what_does_not_isolate(plan, Mode::Container)?;
        self.carry_out(plan).await
    }
}
