//! `codelia api`, `codelia worker`, `codelia migrate`: the parts, each in its own process.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};
use codelia_store::Store;
use codelia_telemetry::task;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{config::Config, modes, options, output::Output, signals};

/// Serves the public API until told to stop.
pub(crate) async fn api(config: &Config, output: Output) -> Result<()> {
    let _telemetry = codelia_telemetry::init(options::telemetry(config, "codelia-api", options::ALONE)?)?;
    let shutdown = signals::shutdown()?;
    let options = options::api(config, modes::configured(config)?, options::ALONE)?;
    let store = connect(config).await?;
    store.check_migrated().await?;
    let service = codelia_api::Service::bind(options, store.clone()).await?;
    let address = service.local_addr();
    let page = Page::open(config.metrics.listen, shutdown.clone()).await?;
    page.ready();
    output.one(&json!({ "ready": "api", "address": address }), &format!("ready api {address}"))?;
    service.serve(shutdown).await?;
    store.close().await;
    Ok(())
}

/// Executes runs until told to stop, then drains.
pub(crate) async fn worker(config: &Config, output: Output) -> Result<()> {
    let _telemetry = codelia_telemetry::init(options::telemetry(config, "codelia-worker", options::ALONE)?)?;
    let shutdown = signals::shutdown()?;
    let backends = modes::backends(config)?;
    let id = options::host_name();
    let socket = config.data_dir.join(format!("run/{}.sock", config.worker.id.as_deref().unwrap_or(&id)));
    let options = options::worker(config, &id, &socket, options::ALONE)?;
    let store = connect(config).await?;
    store.check_migrated().await?;
    let id = options.id.clone();
    let service = codelia_worker::Service::start(options, store.clone(), backends).await?;
    let page = Page::open(config.metrics.listen, shutdown.clone()).await?;
    page.ready();
    let address = service.address().to_owned();
    let text = format!("ready worker {id} {address}");
    output.one(&json!({ "ready": "worker", "worker_id": id, "address": address }), &text)?;
    service.run(shutdown).await?;
    store.close().await;
    Ok(())
}

/// Applies the migrations that are missing.
pub(crate) async fn migrate(config: &Config, output: Output) -> Result<()> {
    let store = connect(config).await?;
    let applied = store.migrate().await?;
    store.close().await;
    let text = match applied {
        0 => "the database is up to date".to_owned(),
        1 => "applied 1 migration".to_owned(),
        n => format!("applied {n} migrations"),
    };
    output.one(&json!({ "applied": applied }), &text)
}

async fn connect(config: &Config) -> Result<Store> {
    let options = options::store(config)?.context("database.url (CODELIA_DATABASE_URL) is not set")?;
    Store::connect(options).await.context("cannot connect to the database")
}

/// The page with metrics and readiness.
#[derive(Debug)]
pub(crate) struct Page {
    ready: Arc<AtomicBool>,
    address: Option<SocketAddr>,
}

impl Page {
    /// Serves it, if it has an address. It is not ready once `shutdown` is canceled, but stays to
    /// be read until this process ends.
    pub(crate) async fn open(listen: Option<SocketAddr>, shutdown: CancellationToken) -> Result<Self> {
        let ready = Arc::new(AtomicBool::new(false));
        let Some(listen) = listen else { return Ok(Self { ready, address: None }) };
        let listener =
            TcpListener::bind(listen).await.with_context(|| format!("metrics.listen: {listen}"))?;
        let address = Some(listener.local_addr()?);
        let said = Arc::clone(&ready);
        let is_ready = move || said.load(Ordering::Acquire) && !shutdown.is_cancelled();
        let served = codelia_telemetry::serve_metrics(listener, CancellationToken::new(), is_ready);
        task::background("metrics page", async move {
            if let Err(error) = served.await {
                tracing::error!(%error, "the metrics page ended");
            }
        });
        Ok(Self { ready, address })
    }

    /// From here on work can be done.
    pub(crate) fn ready(&self) {
        self.ready.store(true, Ordering::Release);
    }

    /// Where it is served.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}
