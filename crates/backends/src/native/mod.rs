//! Mode `native`: namespaces and mounts without a tool.
//!
//! A process for each active session (`codelia-init --zygote`) holds what its sandboxes have in
//! common. A sandbox is a fork of that process in namespaces of its own, so that nothing is
//! executed until the command is.

mod plan;
mod process;
mod zygote;
mod zygotes;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use codelia_init::{Failure, Setup, Step};
use codelia_policy::{Mount, Plan};
use codelia_sys::{
    cgroup::{CgroupParent, Group},
    rlimit,
};
use codelia_types::{Mode, SessionId};

use crate::{
    Backend, Capabilities, Error, Gap, Prepared, alias, isolation,
    mask::Masks,
    mounts::{
        layout,
        overlay::{Namespaces, Overlays},
        view,
    },
    probe::{self, Probed},
    sandbox::{self, ReadyParts, Sandbox, cgroups::Cgroups, control::Control, prepared, setup},
};
use plan::ZygoteSpec;
use process::NativeProcess;
use zygote::{Started, Zygote};
use zygotes::Zygotes;

/// Configuration of mode `native`.
#[derive(Debug, Clone)]
pub struct NativeOptions {
    /// Path of `codelia-init`.
    pub init: PathBuf,
    /// Where the control groups of sandboxes are created.
    pub cgroup_parent: CgroupParent,
    /// Sockets of container engines, which no sandbox shows.
    pub engine_sockets: Vec<PathBuf>,
    /// Whether limits that no control group enforces are watched. Otherwise the mode is not usable
    /// without control groups.
    pub watch_limits: bool,
    /// How many zygotes are kept for the next runs of their sessions.
    pub max_zygotes: usize,
}

/// Creates the backend of mode `native`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn native(options: NativeOptions) -> Result<impl Backend + 'static, Error> {
    // If this fails, every sandbox fails with the step, and the probe shows the remedy.
    if let Err(errno) = rlimit::permit_core_limit() {
        tracing::warn!(%errno, "hard limit of core dumps is 0 and cannot be raised");
    }
    let real = options.engine_sockets.iter().filter_map(|socket| socket.canonicalize().ok());
    let secrets = real.chain(options.engine_sockets.iter().cloned()).collect();
    Ok(Native {
        cgroups: Cgroups::detect(&options.cgroup_parent)?,
        overlays: Overlays::default(),
        zygotes: Zygotes::new(options.max_zygotes),
        init: options.init,
        secrets,
        watch_limits: options.watch_limits,
    })
}

#[derive(Debug)]
struct Native {
    init: PathBuf,
    cgroups: Cgroups,
    overlays: Overlays,
    zygotes: Zygotes,
    /// The sockets of engines, under their configured and their real paths.
    secrets: Vec<PathBuf>,
    watch_limits: bool,
}

impl Native {
    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let plan = &*alias::hide(plan, &self.secrets).await?;
        let mut setup = setup::of(plan)?;
        if let Some(security) = &mut setup.security {
            let masks = Masks::of(&plan.mounts).await?;
            security.view = Some(view::in_zygote(plan, &masks, &mut security.expected));
        }
        let namespaces = self.overlays.mount(&self.init, plan).await?;
        let parts = ReadyParts::of(&setup);
        let group = self.cgroups.create(plan)?;
        match self.start(plan, setup, namespaces, group.as_ref()).await {
            Ok((control, process)) => {
                let zygote = process.zygote();
                let sandbox = Sandbox::new(control, Box::new(process), group);
                let prepared = prepared::prepare_started(sandbox, plan, parts).await?;
                zygote.set_mounts_checked();
                Ok(prepared)
            }
            Err(error) => {
                // A sandbox may have started in it.
                if let Some(group) = group {
                    let left = sandbox::remove_group(group).await;
                    if !left.is_clean() {
                        tracing::error!(receipt = %left, "sandbox left something behind");
                    }
                }
                Err(error)
            }
        }
    }

    async fn start(
        &self,
        plan: &Plan,
        setup: Setup,
        namespaces: Option<Arc<Namespaces>>,
        group: Option<&Group>,
    ) -> Result<(Control, NativeProcess), Error> {
        let wanted = plan::zygote(plan, setup)?;
        let (started, zygote, namespaces) =
            self.start_in_zygote(plan, wanted, namespaces, group).await?;
        Ok((started.control, NativeProcess::new(started.init, plan, zygote, namespaces)?))
    }

    /// Returns the sandbox with what must live as long.
    async fn start_in_zygote(
        &self,
        plan: &Plan,
        wanted: ZygoteSpec,
        namespaces: Option<Arc<Namespaces>>,
        group: Option<&Group>,
    ) -> Result<(Started, Arc<Zygote>, Option<Arc<Namespaces>>), Error> {
        let fds =
            namespaces.as_deref().map(Namespaces::try_clone_fds).transpose()?.unwrap_or_default();
        // Overlays and volumes are gone with the last sandbox, and a transaction's with its run.
        let is_mounted_outside = |mount: &Mount| {
            matches!(
                mount,
                Mount::Overlay { .. } | Mount::Transaction { .. } | Mount::Volume { .. }
            )
        };
        if plan.mounts.iter().any(is_mounted_outside) {
            let zygote = Arc::new(Zygote::create(&self.init, &wanted, fds).await?);
            return Ok((zygote.start(group).await?, zygote, namespaces));
        }
        let (zygote, started) = self.zygotes.start(&self.init, wanted, group).await?;
        Ok((started, zygote, None))
    }
}

#[async_trait]
impl Probed for Native {
    const MODE: Mode = Mode::Native;

    fn init(&self) -> &Path {
        &self.init
    }

    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let created = self.create(plan).await;
        // No other run has the session of a probe.
        self.zygotes.forget(plan.session);
        created
    }

    fn gap(&self, error: &Error) -> Gap {
        probe::sandbox_gap(error, remedy(error).to_owned())
    }
}

#[async_trait]
impl Backend for Native {
    fn mode(&self) -> Mode {
        Mode::Native
    }

    async fn probe(&self) -> Capabilities {
        probe::capabilities(self, &self.cgroups, self.watch_limits).await
    }

    async fn sweep(&self) -> Result<usize, Error> {
        self.zygotes.drop_idle();
        Ok(self.cgroups.remove_orphans()?)
    }

    fn forget_session(&self, session: SessionId) {
        self.zygotes.forget(session);
    }

    fn shutdown(&self) {
        self.zygotes.clear();
        self.cgroups.shutdown();
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        isolation::require_isolating(plan, Mode::Native, self.watch_limits)?;
        layout::create_directories(plan)?;
        self.create(plan).await
    }
}

fn remedy(error: &Error) -> &'static str {
    match error {
        Error::InitFailed(Failure {
            step: Step::ZygoteNamespaces | Step::StartSandbox, ..
        }) => {
            "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone; on \
             Ubuntu kernel.apparmor_restrict_unprivileged_userns=0 or a profile for codelia-init), on Linux 5.12 \
             or later"
        }
        Error::InitFailed(Failure { step: Step::ZygoteMounts, .. }) => {
            "make the directories above the sessions traversable (mode 0711)"
        }
        Error::InitFailed(Failure { step: Step::ZygoteNetwork, .. }) => {
            "allow network namespaces (sysctl user.max_net_namespaces)"
        }
        Error::InitFailed(Failure { step: Step::OwnMounts, .. }) => {
            "give the worker's container an unmasked /proc (Kubernetes: procMount: Unmasked)"
        }
        Error::InitStart { .. } => {
            "make codelia-init executable for every user, and the directories above it traversable"
        }
        error => isolation::init_remedy(error),
    }
}
