//! The resident worker: holds session leases and executes runs.
//!
//! It registers, keeps one heartbeat, takes sessions, executes their runs through a backend, and
//! commits what came of them. It is pushed to by an api and polls beside that; it never trusts its
//! memory over the store, and never acts without a live lease.

#![forbid(unsafe_code)]

mod files;
mod lease;
mod rpc;
mod run;
mod sandbox;
mod worker;
mod workspace;

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use codelia_backends::Backend;
use codelia_store::Store;
use codelia_telemetry::task;
use codelia_types::WorkerId;
use rand::Rng;
use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use lease::{
    drain,
    keeper::{self, Term},
    poll,
};
use rpc::server;
use sandbox::{backends, receipts};
use worker::Worker;
pub use workspace::root::{RootError, untraversable_ancestor};
use workspace::{janitor, root};

/// How long open calls may take to end when the worker leaves.
const CALLS_PATIENCE: Duration = Duration::from_secs(5);
/// How often the janitor sweeps.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// How a worker is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// The same over restarts.
    pub id: WorkerId,
    /// Where session directories live.
    pub root: PathBuf,
    /// Where an api reaches it.
    pub listen: Listen,
    /// The address to tell others, if it is not the one listened on.
    pub advertise: Option<String>,
    /// For [`Listen::Tcp`].
    pub internal_tls: Option<InternalTls>,
    /// Runs it executes at once.
    pub slots: usize,
    /// How long its leases live without a heartbeat.
    pub lease_ttl: Duration,
    /// So much sooner it kills what runs under one that it cannot renew.
    pub lease_margin: Duration,
    /// How often it looks for what no push brought.
    pub poll_interval: Duration,
    /// How long running runs may go on when it leaves.
    pub drain_grace: Duration,
    /// From asking a command to end to killing it.
    pub kill_grace: Duration,
    /// Rows of ended sessions are purged after it.
    pub output_retention: Duration,
    /// With less memory than this left on the host, no spare sandboxes are kept.
    pub min_free_memory_bytes: u64,
    /// Where each session gets a user and group of its own, if this user may give files away.
    pub uids: Option<UidRange>,
}

/// User and group ids that belong to sessions and to nothing else on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UidRange {
    /// The first.
    pub base: u32,
    /// How many.
    pub count: u32,
}

/// Where an api reaches a worker.
#[derive(Debug, Clone)]
pub enum Listen {
    /// A Unix socket, for the same user on the same machine.
    Unix(PathBuf),
    /// TCP; needs [`Options::internal_tls`].
    Tcp(SocketAddr),
}

/// Certificates of the internal channel, in PEM. Both sides show one that `ca_pem` signed.
#[derive(Clone)]
pub struct InternalTls {
    /// Who signs.
    pub ca_pem: Vec<u8>,
    /// The worker's certificate.
    pub cert_pem: Vec<u8>,
    /// Its key.
    pub key_pem: Vec<u8>,
}

impl std::fmt::Debug for InternalTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InternalTls")
    }
}

/// A worker cannot start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store.
    #[error(transparent)]
    Store(#[from] codelia_store::Error),
    /// The session root.
    #[error(transparent)]
    Root(#[from] RootError),
    /// No mode passed its probe.
    #[error("no sandbox mode is usable on this host")]
    NoMode,
    /// An option is out of range.
    #[error("{0} must be more than zero")]
    NotPositive(&'static str),
    /// There would be no time to renew a lease.
    #[error("lease_margin must be at most half of lease_ttl")]
    LeaseMargin,
    /// TCP without certificates.
    #[error("a worker listens on TCP only with certificates")]
    TlsMissing,
    /// The certificates are not usable.
    #[error("the certificates of the internal channel are not usable")]
    Tls(#[source] tonic::transport::Error),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The server stopped.
    #[error("the internal server stopped")]
    Serve(#[source] tonic::transport::Error),
    /// A task that must not end did.
    #[error("the task {0} stopped")]
    Stopped(&'static str),
}

/// A worker that is registered and listens.
#[derive(Debug)]
pub struct Service {
    worker: Arc<Worker>,
    server: JoinHandle<Result<(), Error>>,
    stop_server: CancellationToken,
    /// Ends every loop when dropped.
    _loops: DropGuard,
}

impl Service {
    /// Probes the backends, listens, registers, and begins to serve.
    ///
    /// # Errors
    /// If any of it fails; nothing is left behind then.
    pub async fn start(
        options: Options,
        store: Store,
        backends: Vec<Arc<dyn Backend>>,
    ) -> Result<Self, Error> {
        check(&options)?;
        let root = root::Root::open(&options.root, options.uids)?;
        let modes = backends::Modes::probe(backends, root.untraversable_ancestor()).await;
        if modes.names().is_empty() {
            return Err(Error::NoMode);
        }
        let (listener, address) = server::bind(&options).await?;
        let worker = Worker::new(options, store, modes, root, address);
        let current = keeper::register(worker.as_ref(), worker.options.term()).await?;
        worker.current.send_replace(current);
        let loops = CancellationToken::new();
        start_loops(&worker, &loops);
        let stop_server = loops.child_token();
        let serve = server::serve(listener, worker.clone(), stop_server.clone());
        let server = task::background("internal server", serve);
        tracing::info!(worker = %worker.id(), address = worker.address(), modes = ?worker.modes.names(), "worker ready");
        Ok(Self { worker, server, stop_server, _loops: loops.drop_guard() })
    }

    /// Where an api reaches it.
    #[must_use]
    pub fn address(&self) -> &str {
        self.worker.address()
    }

    /// Works until `shutdown`, then drains and leaves.
    ///
    /// # Errors
    /// If its server fails; it leaves as well then.
    pub async fn run(mut self, shutdown: CancellationToken) -> Result<(), Error> {
        let early = tokio::select! {
            () = shutdown.cancelled() => None,
            ended = &mut self.server => Some(ended.unwrap_or(Err(Error::Stopped("internal server")))),
        };
        drain::leave(&self.worker).await;
        self.worker.modes.leave();
        if let Some(result) = early {
            return result.and(Err(Error::Stopped("internal server")));
        }
        self.stop_server.cancel();
        match timeout(CALLS_PATIENCE, &mut self.server).await {
            Ok(ended) => ended.unwrap_or(Err(Error::Stopped("internal server"))),
            Err(_) => {
                self.server.abort();
                Ok(())
            }
        }
    }
}

fn check(options: &Options) -> Result<(), Error> {
    let zero = [
        ("slots", options.slots == 0),
        ("lease_ttl", options.lease_ttl.is_zero()),
        ("lease_margin", options.lease_margin.is_zero()),
        ("poll_interval", options.poll_interval.is_zero()),
    ];
    match zero.into_iter().find(|(_, is_zero)| *is_zero) {
        Some((name, _)) => Err(Error::NotPositive(name)),
        // A heartbeat comes when a third is over, and may have to be tried again.
        None if options.lease_margin > options.lease_ttl / 2 => Err(Error::LeaseMargin),
        None => Ok(()),
    }
}

impl Options {
    fn term(&self) -> Term {
        Term { ttl: self.lease_ttl, margin: self.lease_margin }
    }
}

fn start_loops(worker: &Arc<Worker>, stop: &CancellationToken) {
    let (w, until) = (worker.clone(), stop.clone());
    task::background("lease keeper", async move {
        until.run_until_cancelled(keeper::keep(w.as_ref(), w.options.term(), &w.current)).await;
    });
    let (w, until) = (worker.clone(), stop.clone());
    task::background("poll", async move {
        let run = repeat("poll", w.options.poll_interval, &w.poll_now, || poll::run_once(&w));
        until.run_until_cancelled(run).await;
    });
    let (w, until) = (worker.clone(), stop.clone());
    task::background("janitor", async move {
        let run = repeat("janitor", SWEEP_EVERY, &w.clean_now, || janitor::run_once(&w));
        until.run_until_cancelled(run).await;
    });
    let (w, until) = (worker.clone(), stop.clone());
    task::background("rotation", async move {
        until.run_until_cancelled(leave_rotation(&w)).await;
    });
    let (w, until) = (worker.clone(), stop.clone());
    task::background("tidy", async move {
        let never = Notify::new();
        let run = repeat("tidy", janitor::ORPHANS_EVERY, &never, || janitor::tidy(&w));
        until.run_until_cancelled(run).await;
    });
}

/// Tries until it is known that the worker is out of rotation.
async fn leave_rotation(worker: &Worker) {
    while let Err(error) = receipts::go_out_of_rotation(worker).await {
        tracing::warn!(%error, "will be tried again");
        sleep(SWEEP_EVERY).await;
    }
}

/// Does something again and again: about every `interval`, and whenever it is asked for.
async fn repeat<F>(name: &'static str, interval: Duration, now: &Notify, once: impl Fn() -> F)
where
    F: Future<Output = Result<(), codelia_store::Error>>,
{
    loop {
        if let Err(error) = once().await {
            tracing::warn!(error = &error as &dyn std::error::Error, name, "will be tried again");
        }
        // Workers that were started together must not knock together for ever.
        let pause = interval.mul_f64(rand::rng().random_range(0.8..1.2));
        tokio::select! {
            () = sleep(pause) => {}
            () = now.notified() => {}
        }
    }
}
