//! Starts the command of a run: checks the lease, gets a sandbox, launches.

use std::{
    borrow::Cow,
    sync::{Arc, atomic::Ordering},
};

use codelia_backends::{Launched, Prepared, Running};
use codelia_policy::{Plan, PlanTarget};
use codelia_store::AssignedRun;
use codelia_telemetry::{Permit, Step, metrics, trace};
use codelia_types::{CommandSpec, Mode, NetworkMode, Outcome, Receipt};
use tokio::{sync::OwnedSemaphorePermit, time::Instant};

use super::{
    active::{ActiveRun, InputReceivers, Started},
    commit::Report,
    executor::{Executor, NoResult, NotStarted},
    io::stdio::{self, Ends},
    reads::{self, DecidedReads},
    retry::retry_until_fenced,
    watch::{
        LimitWatch, LimitWatches, directories,
        volumes::{self, WrittenVolume},
    },
};
use crate::{
    disk::WatchedRun,
    egress::OpenSandbox,
    file_work::blocking,
    sandbox::backends::{
        Denial, denial, failed, no_secrets, not_permitted, session_full, tool_withdrawn,
        unenforceable,
    },
    session::table::Holding,
};

/// A sandbox in network mode `proxy` has no sockets for the egress proxy.
#[derive(Debug, thiserror::Error)]
#[error("the sandbox has no sockets for the egress proxy")]
struct NoEgress;

/// A command that was started.
#[derive(Debug)]
pub(super) struct StartedCommand {
    pub(super) running: Box<dyn Running>,
    pub(super) stdio: Ends,
    pub(super) started: Started,
    /// The way out of its sandbox, in network mode `proxy`.
    pub(super) network: Option<OpenSandbox>,
    /// Decides about its reads, in `filesystem.mode` dynamic.
    pub(super) reads: Option<DecidedReads>,
    /// The limits that are measured while it runs.
    pub(super) watches: LimitWatches,
    /// The volumes that it may write to.
    pub(super) volumes: Vec<WrittenVolume>,
}

/// The deciders that a sandbox is connected to before its command starts.
struct Equipment {
    network: Option<OpenSandbox>,
    reads: Option<DecidedReads>,
}

/// A sandbox for a run.
struct Sandbox {
    prepared: Box<dyn Prepared>,
    /// Whether it was ready before.
    was_ready: bool,
    /// Reserved for its sockets, in network mode `proxy`.
    descriptors: Option<OwnedSemaphorePermit>,
}

impl Executor {
    /// Executes a run until its sandbox is gone. Its result is not committed yet.
    pub(crate) async fn execute(
        &self,
        run: &Arc<ActiveRun>,
        inputs: InputReceivers,
    ) -> Result<Report, NoResult> {
        match self.start(run).await {
            Ok(command) => self.supervise(run, inputs, command).await,
            Err(NotStarted::Denied(denial)) => Ok(denial.into()),
            Err(NotStarted::Canceled(receipt)) => {
                Ok(Report::not_started(Outcome::Canceled, receipt))
            }
            Err(NotStarted::NoResult(no_result)) => Err(no_result),
        }
    }

    /// Starts the command of a run, step by step. Whatever fails leaves no sandbox behind.
    async fn start(&self, run: &ActiveRun) -> Result<StartedCommand, NotStarted> {
        self.check_startable(run).await?;
        let volumes = self.volumes(run).await?;
        let (plan, permit) = self.plan(run).await?;
        let plan = plan.with_volumes(&volumes.directories);
        self.record_shared_paths(&plan).await?;
        let disk = self.watch_disk(run, &plan).await?;
        let command = self.command(run)?;
        let requested_at = Instant::now();
        let mut sandbox = self.sandbox(run, &plan).await?;
        drop(permit);
        let equipment = match self.equip(run, &plan, &mut sandbox).await {
            Ok(equipment) => equipment,
            Err(not_started) => return Err(self.discard(sandbox, not_started).await),
        };
        // Preparation that the run had to wait for counts as setup.
        let waited = requested_at.elapsed();
        run.launched.store(true, Ordering::Release);
        let launched = self.launch(&command, sandbox.prepared).await?;
        let (Launched { running, setup_time, .. }, stdio) = launched;
        let started = Started {
            setup_time: setup_time + waited,
            prepared: sandbox.was_ready,
            unenforced: plan.unenforced_fields(),
            watched: plan.watched_fields(),
        };
        trace::step("launch", setup_time);
        metrics().setup(plan.mode.as_str(), started.prepared, started.setup_time);
        disk.started(running.usage_reader());
        let watches = self.watch_limits(run, disk, &volumes.written);
        let Equipment { network, reads } = equipment;
        Ok(StartedCommand {
            running,
            stdio,
            started,
            network,
            reads,
            watches,
            volumes: volumes.written,
        })
    }

    /// Whether the command may start: the worker may start one, has room for it, and the run is
    /// permitted.
    async fn check_startable(&self, run: &ActiveRun) -> Result<(), NotStarted> {
        let checked_at = Instant::now();
        self.check_lease(run)?;
        trace::step("check lease", checked_at.elapsed());
        if run.cancel.is_cancelled() {
            return Err(NotStarted::Canceled(Receipt::default()));
        }
        self.core.space.look_again_if_short().await;
        if let Some(refusal) = self.core.space.refuse_run() {
            return Err(NotStarted::Denied(refusal.into()));
        }
        self.check_permitted(run).await
    }

    /// Checks again that the command may start, and connects its sandbox to what decides about its
    /// connections and reads.
    async fn equip(
        &self,
        run: &ActiveRun,
        plan: &Plan,
        sandbox: &mut Sandbox,
    ) -> Result<Equipment, NotStarted> {
        self.check_lease(run)?;
        if run.cancel.is_cancelled() {
            return Err(NotStarted::Canceled(Receipt::default()));
        }
        let descriptors = sandbox.descriptors.take();
        let network = self.open_network(run, plan, &mut *sandbox.prepared, descriptors).await?;
        let reads = self.decide_reads(run, &mut *sandbox.prepared).await?;
        Ok(Equipment { network, reads })
    }

    /// Discards the sandbox of a command that is not started. A canceled run reports its receipt.
    async fn discard(&self, sandbox: Sandbox, not_started: NotStarted) -> NotStarted {
        let receipt = sandbox.prepared.discard().await;
        self.core.receipts.record(receipt);
        match not_started {
            NotStarted::Canceled(_) => NotStarted::Canceled(receipt),
            NotStarted::Denied(_) | NotStarted::NoResult(_) => not_started,
        }
    }

    /// Watches all limits that are measured while the command runs.
    fn watch_limits(
        &self,
        run: &ActiveRun,
        disk: WatchedRun,
        volumes: &[WrittenVolume],
    ) -> LimitWatches {
        let workspace = self.core.root.session(run.assigned.session);
        let directories = directories::watch(workspace, &run.assigned.spec.policy);
        let sizes = [directories, volumes::watch(volumes)].into_iter().flatten();
        let sizes = sizes.map(|watch| Box::new(watch) as Box<dyn LimitWatch>);
        LimitWatches(sizes.chain([Box::new(disk) as Box<dyn LimitWatch>]).collect())
    }

    /// Whether the run's command may start now: the lease is live and the session held. A run that
    /// began while its session was being closed is canceled: its directory is about to be removed.
    /// One that has not begun at the end of a drain is handed back.
    fn check_lease(&self, run: &ActiveRun) -> Result<(), NoResult> {
        let current = self.core.lease.borrow();
        if run.fence.is_cancelled() || current.incarnation != run.lease.incarnation {
            return Err(NoResult::LeaseLost);
        }
        if !current.is_live() {
            // The run is dropped, so the incarnation must end too: else the run would never end.
            current.fence.cancel();
            return Err(NoResult::LeaseLost);
        }
        if run.drain_deadline.is_cancelled() {
            return Err(NoResult::NotHeld);
        }
        match self.core.sessions.holding(run.assigned.session) {
            Holding::Held { epoch, closing } if epoch == run.assigned.epoch => {
                if closing {
                    run.cancel_within(None);
                }
                Ok(())
            }
            Holding::Held { .. } | Holding::Acquiring | Holding::Releasing | Holding::NotHeld => {
                Err(NoResult::NotHeld)
            }
        }
    }

    /// Whether a run that waited may still use its tool, and have what a person allowed to it.
    async fn check_permitted(&self, run: &ActiveRun) -> Result<(), NotStarted> {
        let AssignedRun { spec, turn, .. } = &run.assigned;
        if let (Some(tool), true) = (&spec.tool, *turn > 0) {
            let read = || self.core.store.tool_withdrawn(&run.assigned, tool);
            if let Some(why) = retry_until_fenced("read tool", run, read).await? {
                return Err(tool_withdrawn(tool, why).into());
            }
        }
        let has_network = spec.network.is_some_and(|network| network != NetworkMode::None);
        if *turn == 0 || !(has_network || spec.mode == Mode::Logical) {
            return Ok(());
        }
        let read = || self.core.store.run_withdrawn(&run.assigned);
        match retry_until_fenced("read permissions", run, read).await? {
            Some(withdrawn) => Err(not_permitted(spec, withdrawn).into()),
            None => Ok(()),
        }
    }

    async fn plan(&self, run: &ActiveRun) -> Result<(Plan, Option<Permit>), NotStarted> {
        let AssignedRun { session, tenant, spec, .. } = &run.assigned;
        let session = *session;
        let ids = self.core.sessions.ids(session).ok_or(NoResult::NotHeld)?;
        let target =
            PlanTarget { sandbox: run.id(), session, root: self.core.root.session(session) };
        let (plan, permit) = self.core.backends.plan_for(tenant, target, spec, ids).await?;
        Ok((self.with_transaction(run, plan).await?, permit))
    }

    /// Records the host paths that the command may write to: its files there outlive the session,
    /// so its user must not be given to another one.
    async fn record_shared_paths(&self, plan: &Plan) -> Result<(), Denial> {
        let paths = plan.writable_host_paths();
        let (Some(ids), false) = (plan.ids, paths.is_empty()) else { return Ok(()) };
        let root = self.core.root.clone();
        let recorded = blocking(move || root.share_paths(ids, &paths)).await;
        recorded.map_err(|error| failed(&error).into())
    }

    /// Watches the files of the session from now on.
    async fn watch_disk(&self, run: &ActiveRun, plan: &Plan) -> Result<WatchedRun, Denial> {
        let session = run.assigned.session;
        self.core.disk.check_start(session).map_err(session_full)?;
        let watched = self.core.disk.watch_run(session, plan.limits.disk()).await;
        watched.map_err(|error| failed(&error).into())
    }

    /// The session's spare sandbox if it fits, else a new one.
    async fn sandbox(&self, run: &ActiveRun, plan: &Plan) -> Result<Sandbox, NotStarted> {
        let requested_at = Instant::now();
        if let Some(spare) = self.core.sessions.take_spare(run.assigned.session, plan) {
            let was_ready = spare.is_ready();
            match spare.into_sandbox().await {
                Some((prepared, descriptors)) if prepared.is_alive() => {
                    trace::step("take prepared", requested_at.elapsed());
                    return Ok(Sandbox { prepared, was_ready, descriptors });
                }
                Some((prepared, _)) => self.core.receipts.record(prepared.discard().await),
                None => {}
            }
        }
        let descriptors = self.reserve_descriptors(run, plan).await?;
        let prepared = self.core.backends.prepare(plan).await?;
        metrics().step(Step::Prepare, requested_at.elapsed());
        Ok(Sandbox { prepared, was_ready: false, descriptors })
    }

    /// Waits until there are enough descriptors for the sockets of a sandbox in network mode
    /// `proxy`.
    async fn reserve_descriptors(
        &self,
        run: &ActiveRun,
        plan: &Plan,
    ) -> Result<Option<OwnedSemaphorePermit>, NotStarted> {
        if plan.network != NetworkMode::Proxy {
            return Ok(None);
        }
        self.core.egress.warm();
        tokio::select! {
            biased;
            () = run.fence.cancelled() => Err(NoResult::LeaseLost.into()),
            () = run.cancel.cancelled() => Err(NotStarted::Canceled(Receipt::default())),
            () = run.drain_deadline.cancelled() => Err(NoResult::NotHeld.into()),
            descriptors = self.core.egress.reserve() => Ok(descriptors),
        }
    }

    /// Has the egress proxy serve the sandbox, before its command starts.
    async fn open_network(
        &self,
        run: &ActiveRun,
        plan: &Plan,
        sandbox: &mut dyn Prepared,
        descriptors: Option<OwnedSemaphorePermit>,
    ) -> Result<Option<OpenSandbox>, NotStarted> {
        if plan.network != NetworkMode::Proxy {
            return Ok(None);
        }
        let (Some(sockets), Some(descriptors)) = (sandbox.take_egress(), descriptors) else {
            return Err(Denial::from(failed(&NoEgress)).into());
        };
        let subject = run.subject();
        let read = || self.core.egress.decided(&subject);
        let decided = retry_until_fenced("read session lists", run, read).await?;
        let created_with = self.core.sessions.network(subject.session);
        let policy = &run.assigned.spec.policy.network;
        let session = created_with.as_ref();
        let opened = self.core.egress.open(subject, policy, session, decided, sockets, descriptors);
        let opened = opened
            .map_err(|error| unenforceable("policy.network.allowed_hosts", error.to_string()))?;
        Ok(Some(opened))
    }

    /// Has people decide about reads that wait, if the sandbox has such.
    async fn decide_reads(
        &self,
        run: &ActiveRun,
        sandbox: &mut dyn Prepared,
    ) -> Result<Option<DecidedReads>, NotStarted> {
        let Some(reads) = sandbox.take_reads() else { return Ok(None) };
        let subject = run.subject();
        let read = || self.core.store.approval_read_grants(&subject.tenant, subject.session);
        let grants = retry_until_fenced("read grants", run, read).await?;
        Ok(Some(reads::start(
            &self.core.store,
            subject,
            reads,
            grants,
            self.core.options.read_timeout,
        )))
    }

    /// The command with its secret variables.
    fn command<'a>(&self, run: &'a ActiveRun) -> Result<Cow<'a, CommandSpec>, Denial> {
        let command = &run.assigned.spec.command;
        if command.secret_env_names.is_empty() {
            return Ok(Cow::Borrowed(command));
        }
        let key = self.core.options.secret_key.as_ref();
        let key = key.ok_or_else(|| no_secrets("this worker has no `secrets.key_file`"))?;
        let sealed =
            run.assigned.secret_env.as_ref().ok_or_else(|| no_secrets("they are missing"))?;
        let secrets = key.open(run.id(), sealed).map_err(|error| no_secrets(&error.to_string()))?;
        let mut command = command.clone();
        command.env.extend(secrets.0);
        Ok(Cow::Owned(command))
    }

    async fn launch(
        &self,
        command: &CommandSpec,
        sandbox: Box<dyn Prepared>,
    ) -> Result<(Launched, Ends), Denial> {
        let (stdio, ends) = match stdio::open(command) {
            Ok(streams) => streams,
            Err(error) => {
                self.core.receipts.record(sandbox.discard().await);
                return Err(failed(&error).into());
            }
        };
        let mut launched = sandbox.launch(command, stdio).await.map_err(denial)?;
        let ends = match launched.terminal.take() {
            // If this fails, the sandbox is dropped and with it destroyed.
            Some(terminal) => {
                Ends::of_terminal(terminal, command.stdin).map_err(|error| failed(&error))?
            }
            None => ends,
        };
        Ok((launched, ends))
    }
}
