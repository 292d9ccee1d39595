//! The `codelia-init` of a sandbox that a zygote's process has started and reaps.

use std::{io, sync::Arc};

use async_trait::async_trait;
use codelia_policy::Plan;
use codelia_sys::{
    Pid,
    process::{PidFd, TreeRoot},
};
use codelia_types::Receipt;
use tokio::io::unix::AsyncFd;

use crate::{
    Error,
    mounts::overlay::Namespaces,
    sandbox::{
        child::async_fd,
        process::{MountMarkers, SandboxProcess},
    },
};

use super::zygote::Zygote;

/// PID 1 of a sandbox's namespace. When it has ended, the kernel has killed all other processes of
/// the namespace.
#[derive(Debug)]
pub(super) struct NativeProcess {
    init: AsyncFd<PidFd>,
    /// `None` if it had ended before we could ask.
    pid: Option<Pid>,
    mounts: MountMarkers,
    /// The sandbox dies with it.
    zygote: Arc<Zygote>,
    /// Keeps the session's overlays mounted while this sandbox lives.
    _namespaces: Option<Arc<Namespaces>>,
}

impl NativeProcess {
    pub(super) fn new(
        init: PidFd,
        plan: &Plan,
        zygote: Arc<Zygote>,
        namespaces: Option<Arc<Namespaces>>,
    ) -> Result<Self, Error> {
        let pid = init.pid().map_err(io::Error::from)?;
        let init = async_fd(init).map_err(|(_, error)| error)?;
        let mounts = MountMarkers::from_plan(plan);
        Ok(Self { init, pid, mounts, zygote, _namespaces: namespaces })
    }

    pub(super) fn zygote(&self) -> Arc<Zygote> {
        self.zygote.clone()
    }
}

#[async_trait]
impl SandboxProcess for NativeProcess {
    /// Readable once it has ended. However that happened, no process is left.
    async fn wait(&mut self) -> bool {
        self.init.readable().await.is_ok()
    }

    async fn kill(&mut self) {
        if let Err(errno) = self.init.get_ref().kill() {
            tracing::warn!(%errno, "codelia-init not killed");
        }
    }

    fn tool(&self) -> Option<TreeRoot> {
        self.pid.map(TreeRoot::First)
    }

    async fn remove(&mut self) -> Receipt {
        Receipt { mounts: self.mounts.count(), ..Receipt::default() }
    }
}
