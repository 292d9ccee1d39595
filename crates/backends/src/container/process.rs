//! A container from its start to its removal.

use std::{fs, io, path::Path, time::Duration};

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use codelia_init::Report;
use codelia_policy::Plan;
use codelia_sys::{Pid, cgroup::Group};
use codelia_telemetry::task;
use codelia_types::{Mode, NetworkMode, Receipt};
use tokio::{runtime::Handle, time::timeout};

use super::{control_dir::ControlDir, engine::Engine, restrict, spec};
use crate::{
    EgressSockets, Error,
    isolation::{self, INIT},
    sandbox::{
        control::Control,
        process::{SandboxProcess, count},
    },
};

/// How long a container may take from its start until `codelia-init` has connected.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// A container and its control directory. Dropping it removes both in the background.
#[derive(Debug)]
pub(super) struct ContainerProcess {
    engine: Engine,
    name: String,
    control_dir: ControlDir,
    is_removed: bool,
}

impl ContainerProcess {
    pub(super) fn new(engine: Engine, control_dir: ControlDir) -> Self {
        Self { engine, name: control_dir.container_name(), control_dir, is_removed: false }
    }

    /// Starts the container and waits until `codelia-init` connects. Also returns the control
    /// groups that the engine created for it, and the sockets of its network.
    pub(super) async fn start(
        &mut self,
        body: ContainerCreateBody,
        plan: &Plan,
        init: &Path,
    ) -> Result<(Control, Group, Option<EgressSockets>), Error> {
        let id = self.engine.create(&self.name, body).await?;
        self.engine.start(&self.name).await?;
        let (mut control, peer) = tokio::select! {
            accepted = timeout(CONNECT_TIMEOUT, self.control_dir.accept()) => {
                accepted.map_err(|_| Error::InitTimeout)??
            }
            _ = self.engine.wait(&self.name) => return Err(self.exit_error().await),
        };
        let is_on_host = is_init_on_host(peer);
        if plan.has_own_kernel() && is_on_host {
            return Err(Error::SharedKernel);
        }
        // The process of a runtime with its own kernel does not have the mounts of the container.
        let restricts = restrict::is_possible() && is_on_host;
        isolation::require(&[("policy.layout", restricts || plan.layout.is_none())])?;
        let namespace = restricts.then(|| restrict::open_namespace(peer, "mnt"));
        let network = (plan.network == NetworkMode::Proxy).then(|| {
            let can = isolation::require(&[("network", restricts)]);
            can.and_then(|()| restrict::open_namespace(peer, "net"))
        });
        // A peer in the container's control groups is a process of the container.
        let group = match Group::of_process(peer, &id) {
            Ok(group) => group,
            Err(error) => return Err(receive_failure(&mut control).await.unwrap_or(error.into())),
        };
        if is_on_host {
            isolation::limit_terminals(peer).map_err(io::Error::from)?;
        }
        // Engines cannot set this. The command has no socket yet.
        group.limit_sockets(plan.limits.memory_bytes)?;
        if let Some(max) = spec::pids_after_start(plan)
            && !self.engine.limit_pids(&self.name, max).await?
        {
            group.limit_pids(max.unsigned_abs())?;
        }
        if let Some(namespace) = namespace {
            restrict::restrict(init, namespace?, plan).await?;
        }
        let egress = match network {
            Some(network) => Some(restrict::open_egress(init, network?).await?),
            None => None,
        };
        Ok((control, group, egress))
    }

    /// Why the container exited before `codelia-init` connected.
    async fn exit_error(&self) -> Error {
        match self.engine.state(&self.name).await {
            Ok(state) => {
                let code = state.exit_code.unwrap_or_default();
                let error = state.error.unwrap_or_default();
                let message = format!("codelia-init exited with code {code} {error}");
                Error::Tool { mode: Mode::Container, message: message.trim_end().to_owned() }
            }
            Err(error) => error,
        }
    }

    /// The container's mounts that are visible in our own namespace.
    fn mounts_left(&self) -> u32 {
        let is_ours = |line: &&str| line.contains(&self.name);
        let mounts = fs::read_to_string("/proc/self/mountinfo");
        // If the list cannot be read, assume that a mount is left.
        mounts.map_or(1, |mounts| count(mounts.lines().filter(is_ours).count()))
    }
}

/// Whether the peer is `codelia-init` itself. With a runtime that has its own kernel, the peer is a
/// process of the runtime.
fn is_init_on_host(peer: Pid) -> bool {
    let name = fs::read_to_string(format!("/proc/{peer}/comm"));
    name.is_ok_and(|name| Some(name.trim()) == INIT.strip_prefix('/'))
}

/// The failure that `codelia-init` reported if it exited right after it had connected.
async fn receive_failure(control: &mut Control) -> Option<Error> {
    match timeout(CONNECT_TIMEOUT, control.receive()).await {
        Ok(Ok(Some(Report::Failed(failure)))) => Some(Error::InitFailed(failure)),
        _ => None,
    }
}

#[async_trait]
impl SandboxProcess for ContainerProcess {
    async fn wait(&mut self) -> bool {
        matches!(self.engine.wait(&self.name).await, Ok(Some(0) | None))
    }

    async fn kill(&mut self) {
        if let Err(error) = self.engine.kill(&self.name).await {
            tracing::warn!(%error, container = self.name, "container not killed");
        }
    }

    async fn remove(&mut self) -> Receipt {
        let removed = self.engine.remove(&self.name).await;
        if let Err(error) = &removed {
            tracing::error!(%error, container = self.name, "container not removed");
        }
        self.is_removed = removed.is_ok();
        Receipt {
            processes: u32::from(removed.is_err()),
            mounts: self.mounts_left(),
            directories: u32::from(!self.control_dir.remove()),
            ..Receipt::default()
        }
    }

    async fn ran_out_of_memory(&mut self) -> bool {
        self.engine.state(&self.name).await.is_ok_and(|state| state.oom_killed == Some(true))
    }
}

impl Drop for ContainerProcess {
    /// Without a runtime the container is left to the upkeep of the next worker; `codelia-init`
    /// exits when its socket closes.
    fn drop(&mut self) {
        if self.is_removed || Handle::try_current().is_err() {
            return;
        }
        let engine = self.engine.clone();
        let name = self.name.clone();
        task::background("container removal", async move {
            if let Err(error) = engine.remove(&name).await {
                tracing::error!(%error, container = name, "container not removed");
            }
        });
    }
}
