//! `codelia api`, `codelia worker` and `codelia migrate`: each part as a separate process.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use anyhow::{Context, Result};
use codelia_client::{
    output::{Output, write_message},
    signals,
};
use codelia_store::Store;
use codelia_telemetry::{Probes, task};
use codelia_types::WorkerId;
use codelia_worker::Health;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::up::create_data_dir;
use crate::{
    backends,
    config::{Config, Loaded},
    delegation, host, options,
};

/// Keeps other processes of this user from reading, tracing or dumping this process: it holds keys
/// and the data of all tenants.
pub(crate) fn protect_memory() -> Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .context("cannot make this process undumpable")
}

/// Exports how often this process has allocated memory.
#[cfg(feature = "count-allocations")]
fn observe_allocations() {
    let count = codelia_sys::allocation::count;
    codelia_telemetry::observe_counter("codelia_allocations", "Allocations of this process", count);
}

/// Serves the public API until a termination signal arrives.
pub(crate) async fn api(loaded: &Loaded, output: Output) -> Result<()> {
    protect_memory()?;
    let config = &loaded.config;
    let _telemetry = codelia_telemetry::init("codelia-api", &config.log, &config.otlp)?;
    #[cfg(feature = "count-allocations")]
    observe_allocations();
    host::raise_open_files()?;
    let shutdown = signals::shutdown()?;
    let options = options::api(config, backends::configured_mode(config)?)?;
    let store = connect_migrated(config, config.database.clone()).await?;
    let service = codelia_api::Service::bind(options, store.clone()).await?;
    let address = service.local_addr();
    let metrics = MetricsServer::start(config, shutdown.clone()).await?;
    metrics.set_started(None);
    output
        .print(&json!({ "ready": "api", "address": address }), &format!("ready api {address}"))?;
    service.serve(shutdown).await?;
    store.close().await;
    Ok(())
}

/// Executes runs until a termination signal arrives, then drains.
pub(crate) async fn worker(loaded: &Loaded, output: Output) -> Result<()> {
    let config = &loaded.config;
    delegation::enter(config).await?;
    protect_memory()?;
    let _telemetry = codelia_telemetry::init("codelia-worker", &config.log, &config.otlp)?;
    #[cfg(feature = "count-allocations")]
    observe_allocations();
    host::raise_open_files()?;
    let shutdown = signals::shutdown()?;
    // Before the session root in it: session users must be able to pass through.
    create_data_dir(&config.data_dir)?;
    let uids = options::reserve_uids(config)?;
    let backends = backends::create(config, uids)?;
    let default_id = host::host_id();
    let id = config.worker.id.as_ref().map_or(default_id.as_str(), WorkerId::as_str);
    let socket = config.data_dir.join(format!("run/{id}.sock"));
    let options = options::worker(config, &default_id, &socket, uids)?;
    let store = connect_migrated(config, config.database.clone().of_worker()).await?;
    let id = options.id.clone();
    let service = codelia_worker::Service::start(options, store.clone(), backends).await?;
    let metrics = MetricsServer::start(config, shutdown.clone()).await?;
    metrics.set_started(Some(service.health()));
    let address = service.address().to_owned();
    let text = format!("ready worker {id} {address}");
    output.print(&json!({ "ready": "worker", "workerId": id, "address": address }), &text)?;
    service.run(shutdown).await?;
    store.close().await;
    Ok(())
}

/// Applies pending migrations.
pub(crate) async fn migrate(config: &Config, output: Output) -> Result<()> {
    let store = connect(config.database.clone()).await?;
    let applied = store.migrate().await?;
    let roles_missing = store.roles_missing().await?;
    store.close().await;
    let text = match applied {
        0 => "database is up to date".to_owned(),
        1 => "applied 1 migration".to_owned(),
        n => format!("applied {n} migrations"),
    };
    if !roles_missing.is_empty() {
        let names = roles_missing.join(", ");
        write_message(&format!(
            "roles {names} do not exist: to use them, create them and migrate again"
        ));
    }
    output.print(&json!({ "applied": applied, "rolesMissing": roles_missing }), &text)
}

pub(crate) async fn connect(options: codelia_store::Options) -> Result<Store> {
    Store::connect(options).await.context("cannot connect to the database")
}

/// Connects to the database and to the store of output.
async fn connect_migrated(config: &Config, options: codelia_store::Options) -> Result<Store> {
    let key = config.secrets.key()?;
    let store = connect(options).await?.with_audit_key(key.as_ref())?;
    store.check_migrated().await?;
    Ok(store.with_output(&config.output).await?)
}

/// Serves metrics and the answers of probes over HTTP.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    state: Arc<ProcessState>,
    /// The bound address; `None` if metrics are off.
    pub(crate) address: Option<SocketAddr>,
}

/// The state of this process for probes.
#[derive(Debug)]
struct ProcessState {
    /// Set when the process has started; holds the state of its worker, if it has one.
    started: OnceLock<Option<Health>>,
    shutdown: CancellationToken,
}

impl Probes for ProcessState {
    fn is_started(&self) -> bool {
        self.started.get().is_some()
    }

    /// A process that shuts down has a deadline of its own.
    fn is_live(&self) -> bool {
        let worker = self.started.get().and_then(Option::as_ref);
        self.shutdown.is_cancelled() || worker.is_none_or(Health::is_live)
    }

    fn is_ready(&self) -> bool {
        let worker = self.started.get();
        !self.shutdown.is_cancelled()
            && worker.is_some_and(|worker| worker.as_ref().is_none_or(Health::is_ready))
    }
}

impl MetricsServer {
    /// Starts serving, if an address is configured. Reports "not ready" once `shutdown` is
    /// canceled, but serves metrics until the process exits.
    pub(crate) async fn start(config: &Config, shutdown: CancellationToken) -> Result<Self> {
        let state = Arc::new(ProcessState { started: OnceLock::new(), shutdown });
        let Some(listen) = config.metrics.listen else { return Ok(Self { state, address: None }) };
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("metrics.listen: cannot listen on {listen}"))?;
        let address = Some(listener.local_addr()?);
        let options = config.metrics.clone();
        let never = CancellationToken::new();
        task::background(
            "metrics",
            codelia_telemetry::serve_metrics(listener, options, never, state.clone()),
        );
        Ok(Self { state, address })
    }

    /// Reports "started" from now on, and what the worker of this process reports.
    pub(crate) fn set_started(&self, worker: Option<Health>) {
        // Set once: each command calls this once.
        let _ = self.state.started.set(worker);
    }
}
