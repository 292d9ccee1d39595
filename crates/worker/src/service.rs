//! A worker in this process: its start, its work and its end.

use std::{sync::Arc, time::Duration};

use codelia_backends::Backend;
use codelia_store::Store;
use codelia_telemetry::{
    metrics,
    task::{self, CriticalTasks},
};
use futures::future::{FusedFuture, FutureExt};
use tokio::{
    task::{JoinError, JoinHandle, spawn_blocking},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::{
    disk,
    egress::{self, Egress},
    error::Error,
    health::Health,
    lease::keeper,
    loops,
    options::Options,
    rpc::server,
    sandbox::{backends::Backends, canary::Canaries},
    shutdown,
    worker::Worker,
    workspace::root::SessionRoot,
};

/// How long open calls may take to end when the worker stops.
const CALLS_TIMEOUT: Duration = Duration::from_secs(5);

/// A registered worker that accepts calls.
#[derive(Debug)]
pub struct Service {
    worker: Arc<Worker>,
    services: Routes,
    server: JoinHandle<()>,
    /// Dropping them stops them.
    tasks: CriticalTasks,
}

impl Service {
    /// Probes the backends, listens, registers the worker, and starts its loops.
    ///
    /// # Errors
    /// If a step fails; nothing is left behind then.
    pub async fn start(
        options: Options,
        store: Store,
        backends: Vec<Arc<dyn Backend>>,
    ) -> Result<Self, Error> {
        options.worker.check()?;
        metrics().start_worker(egress::attempts());
        let root = open_root(&options)?;
        let trust = Egress::trust_store(&options)?;
        let canaries =
            options.escape.canary_files.then(Canaries::new).transpose().map_err(Error::Canaries)?;
        let backends = Backends::probe(backends, root.untraversable_ancestor()).await;
        let backends = backends.with_trust(trust).with_canaries(canaries.map(Arc::new));
        options.required_mode.map_or(Ok(()), |mode| backends.require(mode))?;
        if backends.modes().is_empty() {
            return Err(Error::NoMode);
        }
        let (listener, address) = server::bind(&options).await?;
        let worker = Worker::new(options, store, backends, root, address);
        let tasks = loops::start(&worker).await?;
        if let server::Listener::Tcp(_, identity) = &listener {
            tasks.critical("certificates", identity.clone().follow());
        }
        let services = server::services(worker.run_service(), worker.file_service());
        let options = &worker.core.options;
        let connections = options.worker.connections(options.open_files);
        let serve = server::serve(listener, services.clone(), connections, tasks.stop_token());
        let server = task::background("internal server", serve);
        let modes: Vec<&str> =
            worker.core.backends.modes().iter().map(|mode| mode.as_str()).collect();
        let modes = modes.join(",");
        let disk = worker.core.disk.mechanism().as_str();
        tracing::info!(worker = %options.id, address = worker.address, modes, disk, "worker ready");
        Ok(Self { worker, services, server, tasks })
    }

    /// The address under which apis reach the worker.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.worker.address
    }

    /// The services that apis call, for an api in this process.
    #[must_use]
    pub fn services(&self) -> Routes {
        self.services.clone()
    }

    /// The state of the worker for probes.
    #[must_use]
    pub fn health(&self) -> Health {
        Health::new(&self.worker)
    }

    /// Works until `shutdown`, then drains and unregisters the worker.
    ///
    /// # Errors
    /// If the internal server or a loop of the worker ends. The worker drains then too, except
    /// that it kills its runs if nothing renews its lease.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), Error> {
        let Self { worker, server, mut tasks, .. } = self;
        let abort_server = server.abort_handle();
        let mut server = server.map(served).fuse();
        let server_error =
            async { (&mut server).await.err().unwrap_or(Error::Stopped("internal server")) };
        let stopped = shutdown::requested_or_failed(&shutdown, &mut tasks, server_error).await;
        if let Err(error) = &stopped {
            tracing::error!(error = error as &dyn std::error::Error, "worker failed, stopping");
        }
        let drained = worker.clone();
        let drain = async move { drained.drainer.drain().await };
        let result = shutdown::drain_or_fence(stopped, &mut tasks, drain, fence(&worker)).await;
        // The proxy's control group is next to those of the sandboxes, whose parent goes last.
        worker.core.egress.shut_down().await;
        worker.core.backends.shut_down();
        let root = worker.core.root.clone();
        if let Err(error) = spawn_blocking(move || root.close_sessions(true)).await {
            tracing::error!(%error, "cannot close the directories of sessions");
        }
        // The worker has left: nothing may renew its lease or register it again. This stops the
        // server too.
        drop(tasks);
        if server.is_terminated() {
            return result;
        }
        match timeout(CALLS_TIMEOUT, server).await {
            Ok(served) => result.and(served),
            Err(_) => {
                abort_server.abort();
                result
            }
        }
    }
}

/// Opens the session root with what limits the disk space of sessions.
fn open_root(options: &Options) -> Result<SessionRoot, Error> {
    let root = SessionRoot::open(&options.root, options.uids)?;
    let (quota, report) =
        disk::choose(root.path(), options.worker.disk, root.has_separate_users())?;
    for (mechanism, missing) in &report.rejected {
        tracing::info!(%mechanism, reason = %missing, "disk limits: mechanism not available");
    }
    tracing::info!(mechanism = %report.mechanism, "disk limits");
    Ok(root.with_quota(quota))
}

/// Gives the lease up and kills everything that runs under it.
async fn fence(worker: &Worker) {
    keeper::fence(&worker.registration, &worker.core.lease).await;
    worker.drainer.discard_spares().await;
}

fn served(ended: Result<(), JoinError>) -> Result<(), Error> {
    ended.map_err(|_| Error::Stopped("internal server"))
}
