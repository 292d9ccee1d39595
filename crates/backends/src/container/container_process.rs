//! A container from its start to its removal.

use std::{fs, time::Duration};

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use codelia_init::Report;
use codelia_policy::Plan;
use codelia_sys::{Pid, cgroup::Group};
use codelia_telemetry::task;
use codelia_types::{Mode, Receipt};
use tokio::{runtime::Handle, time::timeout};

use super::{Channel, Engine, spec};
use crate::{Error, sandbox::control::Control, tool::tool_backend::INIT};

/// How long a container may take from its start until `codelia-init` has connected.
const PATIENCE: Duration = Duration::from_secs(30);

/// A container and its directory. Dropped, it is removed in the background.
#[derive(Debug)]
pub(super) struct Holder {
    engine: Engine,
    name: String,
    channel: Channel,
    is_removed: bool,
}

impl Holder {
    pub(super) fn new(engine: Engine, channel: Channel) -> Self {
        Self { engine, name: channel.name(), channel, is_removed: false }
    }

    /// Starts it and waits for `codelia-init`; answers also the groups that the engine made for it.
    pub(super) async fn start(
        &mut self,
        body: ContainerCreateBody,
        plan: &Plan,
    ) -> Result<(Control, Group), Error> {
        let id = self.engine.create(&self.name, body).await?;
        self.engine.start(&self.name).await?;
        let (mut control, peer) = tokio::select! {
            connected = timeout(PATIENCE, self.channel.accept()) => connected.map_err(|_| Error::Unresponsive)??,
            _ = self.engine.ended(&self.name) => return Err(self.complaint().await),
        };
        if spec::has_own_kernel(plan) && is_init(peer) {
            return Err(Error::SharedKernel);
        }
        // Who is in the container's own groups is in the container.
        let group = match Group::of_process(peer, &id) {
            Ok(group) => group,
            Err(error) => return Err(last_words(&mut control).await.unwrap_or(error.into())),
        };
        if let Some(most) = spec::later_pids(plan)
            && !self.engine.limit_pids(&self.name, most).await?
        {
            group.limit_pids(most.unsigned_abs())?;
        }
        Ok((control, group))
    }

    /// Why it ended before `codelia-init` connected.
    async fn complaint(&self) -> Error {
        match self.engine.state(&self.name).await {
            Ok(state) => {
                let (error, code) = (state.error.unwrap_or_default(), state.exit_code.unwrap_or_default());
                Error::Tool {
                    mode: Mode::Container,
                    complaint: format!("codelia-init ended with {code} {error}"),
                }
            }
            Err(error) => error,
        }
    }

    /// What of it is on the host's list of mounts, if we see the engine's.
    fn mounts_left(&self) -> usize {
        let mounts = fs::read_to_string("/proc/self/mountinfo");
        mounts.map_or(1, |mounts| mounts.lines().filter(|line| line.contains(&self.name)).count())
    }
}

/// Whether the host knows it as `codelia-init`: a runtime with a kernel of its own has its own processes there.
fn is_init(peer: Pid) -> bool {
    let name = fs::read_to_string(format!("/proc/{peer}/comm"));
    name.is_ok_and(|name| Some(name.trim()) == INIT.strip_prefix('/'))
}

/// What `codelia-init` said if it ended at once.
async fn last_words(control: &mut Control) -> Option<Error> {
    match timeout(PATIENCE, control.receive()).await {
        Ok(Ok(Some(Report::Failed(failure)))) => Some(Error::InitFailed(failure)),
        _ => None,
    }
}

#[async_trait]
impl crate::sandbox::sandbox_process::Holder for Holder {
    async fn ended(&mut self) -> bool {
        matches!(self.engine.ended(&self.name).await, Ok(Some(0) | None))
    }

    async fn kill(&mut self) {
        if let Err(error) = self.engine.kill(&self.name).await {
            tracing::warn!(%error, container = self.name, "a container was not killed");
        }
    }

    async fn remove(&mut self) -> Receipt {
        let removed = self.engine.remove(&self.name).await;
        if let Err(error) = &removed {
            tracing::error!(%error, container = self.name, "a container is left");
        }
        self.is_removed = removed.is_ok();
        Receipt {
            processes: u32::from(removed.is_err()),
            mounts: u32::try_from(self.mounts_left()).unwrap_or(u32::MAX),
            directories: u32::from(!self.channel.remove()),
            ..Receipt::default()
        }
    }

    async fn ran_out_of_memory(&mut self) -> bool {
        self.engine.state(&self.name).await.is_ok_and(|state| state.oom_killed == Some(true))
    }
}

impl Drop for Holder {
    /// Without a runtime it is left to the next worker that sweeps: `codelia-init` ends with its socket.
    fn drop(&mut self) {
        if self.is_removed || Handle::try_current().is_err() {
            return;
        }
        let (engine, name) = (self.engine.clone(), self.name.clone());
        task::background("container removal", async move {
            if let Err(error) = engine.remove(&name).await {
                tracing::error!(%error, container = name, "a container is left");
            }
        });
    }
}
