//! Mode `native`: namespaces and mounts without a tool.
//!
//! A process for each active session (`codelia-init --zygote`) holds what its sandboxes have in
//! common. A sandbox is a fork of that process in namespaces of its own, so that nothing is
//! executed until the command is.

mod plan;
mod process;
mod zygote;
mod zygotes;

use std::{io, path::Path, sync::Arc};

use codelia_init::{ExpectedEnvironment, Failure, Setup, Step, View};
use codelia_policy::{Mount, Plan};
use codelia_sys::cgroup::Group;
use codelia_types::{Mode, SessionId};

use crate::{
    Backend, Error, HostOptions, Prepared,
    host_mode::{Host, HostBackend, HostMode},
    isolation,
    mask::Masks,
    mounts::{overlay::Namespaces, view},
    sandbox::{self, ReadyParts, Sandbox, control::Control, prepared},
};
use process::NativeProcess;
use zygote::Zygote;
use zygotes::Zygotes;

/// Configuration of mode `native`.
#[derive(Debug, Clone)]
pub struct NativeOptions {
    /// The part that all modes on the host have.
    pub host: HostOptions,
    /// How many zygotes are kept for the next runs of their sessions.
    pub max_zygotes: usize,
}

/// Creates the backend of mode `native`.
///
/// # Errors
/// `/proc` cannot be read.
pub fn native(options: NativeOptions) -> Result<impl Backend + 'static, Error> {
    HostBackend::new(Native { zygotes: Zygotes::new(options.max_zygotes) }, options.host)
}

#[derive(Debug)]
struct Native {
    zygotes: Zygotes,
}

impl Native {
    /// Starts `codelia-init` in a zygote: a kept one, or one of its own.
    async fn start_process(
        &self,
        init: &Path,
        plan: &Plan,
        setup: Setup,
        overlays: Option<Arc<Namespaces>>,
        group: Option<&Group>,
    ) -> Result<(Control, NativeProcess), Error> {
        let wanted = plan::zygote(plan, setup)?;
        // Overlays and volumes are gone with the last sandbox, and a transaction's with its run.
        let is_mounted_outside = |mount: &Mount| {
            matches!(
                mount,
                Mount::Overlay { .. } | Mount::Transaction { .. } | Mount::Volume { .. }
            )
        };
        let (zygote, started, overlays) = if plan.mounts.iter().any(is_mounted_outside) {
            let fds = overlays.as_deref().map(Namespaces::try_clone_fds).transpose()?;
            let zygote = Zygote::create(init, &wanted, fds.unwrap_or_default()).await?;
            let started = zygote.start(group).await?;
            (Arc::new(zygote), started, overlays)
        } else {
            let (zygote, started) = self.zygotes.start(init, wanted, group).await?;
            (zygote, started, None)
        };
        Ok((started.control, NativeProcess::new(started.init, plan, zygote, overlays)?))
    }
}

impl HostMode for Native {
    const MODE: Mode = Mode::Native;

    fn view(
        &self,
        plan: &Plan,
        masks: &Masks,
        expected: &mut ExpectedEnvironment,
    ) -> Result<View, Error> {
        Ok(view::in_zygote(plan, masks, expected))
    }

    async fn start(
        &self,
        host: &Host,
        plan: &Plan,
        setup: Setup,
        overlays: Option<Arc<Namespaces>>,
    ) -> Result<Box<dyn Prepared>, Error> {
        let parts = ReadyParts::of_setup(&setup);
        let group = host.cgroups.create(plan)?;
        match self.start_process(&host.init, plan, setup, overlays, group.as_ref()).await {
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

    /// Drops what no run used for a while. The kernel removes everything else of a killed worker.
    fn upkeep(&self) -> io::Result<usize> {
        self.zygotes.drop_idle();
        Ok(0)
    }

    fn remedy(&self, error: &Error) -> &'static str {
        match error {
            Error::InitFailed(Failure {
                step: Step::ZygoteNamespaces | Step::StartSandbox,
                ..
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

    fn forget_session(&self, session: SessionId) {
        self.zygotes.forget(session);
    }

    fn shutdown(&self) {
        self.zygotes.clear();
    }
}
