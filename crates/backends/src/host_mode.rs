//! Common parts of the modes that show files of the host (bwrap, nsjail, native): the steps from a
//! plan to a sandbox, and the probe.

use std::{
    env, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use codelia_init::{ExpectedEnvironment, Setup, View};
use codelia_policy::{Enforceable, Mount, Plan, limits_remedy};
use codelia_sys::{cgroup::CgroupParent, rlimit};
use codelia_types::{Mode, SessionId};

use crate::{
    Backend, Capabilities, Error, Prepared, alias,
    isolation::{self, PROBE},
    mask::Masks,
    mounts::{
        layout,
        overlay::{self, Namespaces, Overlays},
    },
    probe,
    sandbox::{cgroups::Cgroups, setup},
};

/// Configuration that the modes have in common.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Path of `codelia-init`.
    pub init: PathBuf,
    /// Where the control groups of sandboxes are created.
    pub cgroup_parent: CgroupParent,
    /// Sockets of container engines, which no sandbox shows.
    pub engine_sockets: Vec<PathBuf>,
    /// Whether limits that no control group enforces are watched. Otherwise the mode is not usable
    /// without control groups.
    pub watch_limits: bool,
}

/// A mode that makes namespaces and mounts on the host.
pub(crate) trait HostMode: Send + Sync + std::fmt::Debug {
    /// The mode it implements.
    const MODE: Mode;

    /// The changes of `codelia-init` in the mounts of a plan. Adds the mounts that the mode makes
    /// by itself to those that init must find.
    fn view(
        &self,
        plan: &Plan,
        masks: &Masks,
        expected: &mut ExpectedEnvironment,
    ) -> Result<View, Error>;

    /// Creates the control group and starts `codelia-init` in it and in its namespaces, to which
    /// `overlays` belong. Returns when init is ready. After an error nothing of it is left.
    fn start(
        &self,
        host: &Host,
        plan: &Plan,
        setup: Setup,
        overlays: Option<Arc<Namespaces>>,
    ) -> impl Future<Output = Result<Box<dyn Prepared>, Error>> + Send;

    /// Removes what killed workers left in addition to control groups. Returns how many items it
    /// removed.
    fn upkeep(&self) -> io::Result<usize>;

    /// How to fix an error of [`HostMode::start`].
    fn remedy(&self, error: &Error) -> &'static str;

    /// As [`Backend::forget_session`].
    fn forget_session(&self, _: SessionId) {}

    /// As [`Backend::shutdown`].
    fn shutdown(&self) {}
}

/// The host as a mode uses it.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) init: PathBuf,
    pub(crate) cgroups: Cgroups,
    overlays: Overlays,
    /// The sockets of engines, under their configured and their real paths.
    secrets: Vec<PathBuf>,
    watch_limits: bool,
}

/// The backend of a mode.
#[derive(Debug)]
pub(crate) struct HostBackend<M> {
    mode: M,
    host: Host,
}

impl<M: HostMode> HostBackend<M> {
    /// Detects the control groups of this host.
    pub(crate) fn new(mode: M, options: HostOptions) -> Result<Self, Error> {
        // If this fails, every sandbox fails with the step, and the probe shows the remedy.
        if let Err(errno) = rlimit::permit_core_limit() {
            tracing::warn!(%errno, "hard limit of core dumps is 0 and cannot be raised");
        }
        let HostOptions { init, cgroup_parent, engine_sockets, watch_limits } = options;
        let cgroups = Cgroups::detect(&cgroup_parent)?;
        let real = engine_sockets.iter().filter_map(|socket| socket.canonicalize().ok());
        let secrets = real.chain(engine_sockets.iter().cloned()).collect();
        let host = Host { init, cgroups, overlays: Overlays::default(), secrets, watch_limits };
        Ok(Self { mode, host })
    }

    async fn create(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        let plan = &*alias::hide(plan, &self.host.secrets).await?;
        let mut setup = setup::for_plan(plan)?;
        if let Some(security) = &mut setup.security {
            let masks = Masks::resolve(&plan.mounts).await?;
            security.view = Some(self.mode.view(plan, &masks, &mut security.expected)?);
        }
        let overlays = self.host.overlays.mount(&self.host.init, plan).await?;
        self.mode.start(&self.host, plan, setup, overlays).await
    }

    /// Runs a trivial command through a whole sandbox.
    async fn try_plan(&self, plan: Result<Plan, Error>) -> Result<(), Error> {
        let plan = plan?;
        let created = self.create(&plan).await;
        // No other run has the session of a probe.
        self.mode.forget_session(plan.session);
        probe::run(created?, Path::new(PROBE)).await
    }

    /// As [`HostBackend::try_plan`], with an overlay over `/usr`.
    async fn try_overlay(&self, plan: Result<Plan, Error>) -> Result<(), Error> {
        let mut plan = plan?;
        let layers = env::temp_dir().join(plan.sandbox.to_string());
        let source = "/usr".into();
        let target = "/usr".into();
        plan.mounts.push(Mount::Overlay { source, target, layer: layers.join("usr") });
        let tried = self.try_plan(Ok(plan)).await;
        let removed = overlay::remove_layers(&layers);
        tried.and(Ok(removed?))
    }
}

#[async_trait]
impl<M: HostMode> Backend for HostBackend<M> {
    fn mode(&self) -> Mode {
        M::MODE
    }

    /// Tries everything that a plan may need: limits, a whole sandbox, and its optional parts.
    async fn probe(&self) -> Capabilities {
        let Host { init, cgroups, watch_limits, .. } = &self.host;
        let mut gaps = Vec::new();
        let limits = cgroups.probe(limits_remedy(M::MODE, *watch_limits), &mut gaps);
        let limits = Enforceable { violations: true, watches: *watch_limits, ..limits };
        let plan = |only| probe::isolated_plan(M::MODE, init, limits, only);
        if let Err(error) = self.try_plan(plan(None)).await {
            gaps.push(probe::sandbox_gap(&error, self.mode.remedy(&error)));
            return Capabilities { mode: M::MODE, usable: false, enforceable: limits, gaps };
        }
        let executables = self.try_plan(plan(Some(Path::new(PROBE)))).await;
        let egress = self.try_plan(probe::egress_plan(M::MODE, init, limits)).await;
        let overlays = self.try_overlay(plan(None)).await;
        let asked_reads = self.try_plan(probe::reads_plan(M::MODE, init, limits)).await;
        let enforceable = Enforceable {
            network: true,
            syscalls: true,
            layouts: true,
            executables: probe::is_possible(executables, &mut gaps, isolation::executables_gap),
            egress: probe::is_possible(egress, &mut gaps, |error| {
                isolation::egress_gap(M::MODE, error)
            }),
            overlays: probe::is_possible(overlays, &mut gaps, isolation::overlay_gap),
            asked_reads: probe::is_possible(asked_reads, &mut gaps, isolation::reads_gap),
            ..limits
        };
        // Without limits it would refuse every run.
        let usable = limits.limits() || *watch_limits;
        Capabilities { mode: M::MODE, usable, enforceable, gaps }
    }

    async fn upkeep(&self) -> Result<usize, Error> {
        let removed = self.mode.upkeep().map_err(Error::Upkeep)?;
        Ok(removed + self.host.cgroups.remove_orphans()?)
    }

    fn forget_session(&self, session: SessionId) {
        self.mode.forget_session(session);
    }

    fn shutdown(&self) {
        self.mode.shutdown();
        self.host.cgroups.shutdown();
    }

    async fn prepare(&self, plan: &Plan) -> Result<Box<dyn Prepared>, Error> {
        isolation::require_isolating(plan, M::MODE, self.host.watch_limits)?;
        layout::create_directories(plan)?;
        self.create(plan).await
    }
}
