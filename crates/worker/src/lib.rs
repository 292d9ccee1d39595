//! The resident worker: holds session leases and executes runs.
//!
//! A worker registers, keeps one heartbeat, acquires sessions, executes their runs through a
//! backend, and commits the results. Apis push runs to it, and it also polls the store. The store
//! decides: the worker never trusts its memory over it, and never acts without a live lease.

#![forbid(unsafe_code)]

mod canary;
mod disk;
mod egress;
mod fault;
mod files;
mod health;
mod lease;
mod loops;
mod reads;
mod rpc;
mod run;
mod sandbox;
mod shutdown;
mod wakeups;
mod worker;
mod workspace;

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use codelia_backends::{Backend, CgroupParent};
use codelia_policy::EscapeOptions;
use codelia_server::{TlsError, TlsFiles};
use codelia_store::{Retention, SecretKey, Store};
use codelia_telemetry::{
    metrics,
    task::{self, CriticalTaskEnded, CriticalTasks},
};
use codelia_types::{Mode, TenantId, WorkerId};
use futures::future::{FusedFuture, FutureExt};
use tokio::{
    task::{JoinError, JoinHandle},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

pub use disk::root_space;
pub use egress::TrustError;
pub use health::Health;

use canary::Canaries;
use egress::Egress;
use lease::keeper;
use rpc::server;
use sandbox::backends::Backends;
use worker::Worker;
use workspace::root::SessionRoot;
pub use workspace::{
    root::{RootError, untraversable_ancestor},
    uid_range::{UidError, UidOptions, UidRange, reserve_uids},
};

/// How long open calls may take to end when the worker stops.
const CALLS_TIMEOUT: Duration = Duration::from_secs(5);

/// The configuration of a worker.
#[derive(Debug, Clone)]
pub struct Options {
    /// Stays the same over restarts.
    pub id: WorkerId,
    /// The directory that holds session directories.
    pub root: PathBuf,
    /// Where the worker listens for apis.
    pub listen: Listen,
    /// The address that apis use, if it is not the one that the worker listens on.
    pub advertise: Option<String>,
    /// Required by [`Listen::Tcp`].
    pub internal_tls: Option<TlsFiles>,
    /// How many runs are executed concurrently.
    pub slots: usize,
    /// How long leases live without a heartbeat.
    pub lease_ttl: Duration,
    /// How long before the end of a lease that it cannot renew the worker kills its sandboxes.
    pub lease_margin: Duration,
    /// How often the worker looks in the store for runs that were not pushed.
    pub poll_interval: Duration,
    /// How long running runs may continue when the worker shuts down.
    pub drain_grace: Duration,
    /// From the signal that asks a command to end to the one that kills it.
    pub kill_grace: Duration,
    /// What is done when a command tries to leave its sandbox.
    pub escape: EscapeOptions,
    /// Whether sandboxes have decoys. Opening one is a sign of an attempt to leave it.
    pub canary_files: bool,
    /// How long rows are kept, unless their tenant has a retention of its own.
    pub retention: Retention,
    /// How long a file call may work. Reads and writes of content end by their own limits.
    pub file_call_timeout: Duration,
    /// With less free memory on the host than this, the worker keeps no spare sandboxes.
    pub min_free_memory_bytes: u64,
    /// With less free space for sessions than this, the worker takes no new sessions and starts no runs.
    /// `None` for 1 GiB, and at most a tenth of the file system.
    pub disk_reserve_bytes: Option<u64>,
    /// A mode that must be usable: without it the worker does not start.
    pub required_mode: Option<Mode>,
    /// Gives each session its own user and group, if the worker may change the owner of files.
    pub uids: Option<UidRange>,
    /// Decrypts secret variables; without it, the worker refuses runs that have some.
    pub secret_key: Option<SecretKey>,
    /// Limits of connections.
    pub connections: codelia_server::Limits,
    /// How many files the process may open.
    pub open_files: u64,
    /// The egress proxy of runs with network mode `proxy`.
    pub egress: EgressOptions,
    /// A read that waits for a decision is denied after this time.
    pub read_timeout: Duration,
    /// Where control groups are created.
    pub cgroup_parent: CgroupParent,
}

/// The settings of the egress proxy. Secrets are only in the files that it reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressOptions {
    /// DNS servers that resolve allowed names. Empty for those of `/etc/resolv.conf`.
    pub resolvers: Vec<SocketAddr>,
    /// Networks that allowed names may lead to although they are private, as `ADDRESS/BITS`.
    pub private_addresses: Vec<String>,
    /// A proxy that connections leave through, after all checks.
    pub upstream: Option<EgressUpstream>,
    /// Those of tenants that have one of their own.
    pub tenant_upstreams: BTreeMap<TenantId, EgressUpstream>,
    /// A TOML file with the secrets of hosts and of the upstream proxies.
    pub credentials_file: Option<PathBuf>,
    /// The directory with the certificate authority for hosts with credentials.
    pub ca_dir: Option<PathBuf>,
    /// A PEM file with authorities that the proxy trusts in addition to the system's.
    pub extra_roots_file: Option<PathBuf>,
    /// A connection that waits for a decision is refused after this time.
    pub ask_timeout: Duration,
    /// For resolving a name and connecting to it.
    pub connect_timeout: Duration,
    /// For the head of a request, and for the start of a TLS or SOCKS handshake.
    pub header_timeout: Duration,
}

impl Default for EgressOptions {
    fn default() -> Self {
        Self {
            resolvers: Vec::new(),
            private_addresses: Vec::new(),
            upstream: None,
            tenant_upstreams: BTreeMap::new(),
            credentials_file: None,
            ca_dir: None,
            extra_roots_file: None,
            ask_timeout: Duration::from_secs(120),
            connect_timeout: Duration::from_secs(15),
            header_timeout: Duration::from_secs(10),
        }
    }
}

/// A proxy between this host and the destinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EgressUpstream {
    /// SOCKS5.
    Socks5(SocketAddr),
    /// HTTP `CONNECT`.
    Http(SocketAddr),
}

/// Where a worker listens for apis.
#[derive(Debug, Clone)]
pub enum Listen {
    /// A Unix socket, for the same user on the same machine.
    Unix(PathBuf),
    /// TCP; requires [`Options::internal_tls`].
    Tcp(SocketAddr),
}

/// Why a worker cannot start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] codelia_store::Error),
    /// The session root cannot be used.
    #[error(transparent)]
    Root(#[from] RootError),
    /// No backend passed its probe.
    #[error("no sandbox mode is usable on this host (run `codelia doctor` to see why)")]
    NoMode,
    /// The configured mode did not pass its probe.
    #[error("sandbox.mode: {mode} is not usable on this host: {problem}")]
    Mode {
        /// The mode.
        mode: Mode,
        /// What is missing, and how to get it.
        problem: String,
    },
    /// A number in the options must be greater than zero.
    #[error("{0} must be greater than zero")]
    NotPositive(&'static str),
    /// The margin leaves no time to renew a lease.
    #[error("lease_margin must be at most half of lease_ttl")]
    LeaseMargin,
    /// TCP needs certificates.
    #[error(
        "worker.listen: TCP needs TLS certificates: set internal.tls_ca, internal.tls_cert and \
         internal.tls_key (`codelia certs dev` creates some)"
    )]
    TlsMissing,
    /// The certificates cannot be used.
    #[error("cannot use the TLS certificates of the internal channel")]
    Tls(#[source] TlsError),
    /// The address cannot be used.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A loop of the worker ended.
    #[error(transparent)]
    CriticalTask(#[from] CriticalTaskEnded),
    /// A thread of the worker cannot be started.
    #[error("cannot start a thread of the worker")]
    Thread(#[source] std::io::Error),
    /// The trust store of sandboxes whose requests get credentials could not be created.
    #[error("cannot create the certificate authority (egress.ca_dir)")]
    Trust(#[from] TrustError),
    /// Canary files cannot be watched.
    #[error(
        "cannot watch canary files; switch escape.canary_files off, or raise fs.inotify.max_user_instances"
    )]
    Canaries(#[source] std::io::Error),
    /// A task panicked or ended early.
    #[error("the task {0:?} stopped unexpectedly")]
    Stopped(&'static str),
}

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
        check(&options)?;
        metrics().start_worker(egress::attempts());
        let root = SessionRoot::open(&options.root, options.uids)?;
        let trust = Egress::trust_store(&options)?;
        let canaries = options.canary_files.then(Canaries::new).transpose().map_err(Error::Canaries)?;
        let backends = Backends::probe(backends, root.untraversable_ancestor()).await;
        let backends = backends.with_trust(trust).with_canaries(canaries.map(Arc::new));
        options.required_mode.map_or(Ok(()), |mode| backends.require(mode))?;
        if backends.modes().is_empty() {
            return Err(Error::NoMode);
        }
        let (listener, address) = server::bind(&options).await?;
        let worker = Worker::new(&options, store, backends, root, address);
        let tasks = loops::start(&worker).await?;
        if let server::Listener::Tcp(_, identity) = &listener {
            tasks.critical("certificates", identity.clone().follow());
        }
        let services = server::services(worker.run_service(), worker.file_service());
        let serve = server::serve(listener, services.clone(), options.connections, tasks.stop_token());
        let server = task::background("internal server", serve);
        let modes: Vec<&str> = worker.backends.modes().iter().map(|mode| mode.as_str()).collect();
        let (modes, disk) = (modes.join(","), worker.disk.mechanism().as_str());
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

    /// What probes ask of the worker.
    #[must_use]
    pub fn health(&self) -> Health {
        Health::of(&self.worker)
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
        let server_error = async { (&mut server).await.err().unwrap_or(Error::Stopped("internal server")) };
        let stopped = shutdown::requested_or_failed(&shutdown, &mut tasks, server_error).await;
        if let Err(error) = &stopped {
            tracing::error!(error = error as &dyn std::error::Error, "worker failed, stopping");
        }
        let drained = worker.clone();
        let drain = async move { drained.drainer.drain().await };
        let result = shutdown::drain_or_fence(stopped, &mut tasks, drain, fence(&worker)).await;
        // Its control group is next to those of the sandboxes, whose parent goes last.
        worker.egress.shut_down().await;
        worker.backends.shut_down();
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

/// Gives the lease up and kills everything that runs under it.
async fn fence(worker: &Worker) {
    keeper::fence(&*worker.registration, &worker.lease).await;
    worker.drainer.discard_spares().await;
}

fn served(ended: Result<(), JoinError>) -> Result<(), Error> {
    ended.map_err(|_| Error::Stopped("internal server"))
}

fn check(options: &Options) -> Result<(), Error> {
    let zero = [
        ("slots", options.slots == 0),
        ("lease_ttl", options.lease_ttl.is_zero()),
        ("lease_margin", options.lease_margin.is_zero()),
        ("poll_interval", options.poll_interval.is_zero()),
        ("file_call_timeout", options.file_call_timeout.is_zero()),
    ];
    match zero.into_iter().find(|(_, is_zero)| *is_zero) {
        Some((name, _)) => Err(Error::NotPositive(name)),
        // The worker renews after a third of the time to live, and may have to retry.
        None if options.lease_margin > options.lease_ttl / 2 => Err(Error::LeaseMargin),
        None => Ok(()),
    }
}
