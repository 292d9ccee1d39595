//! `codelia up`: database, api and worker in one process, checked before it says `ready`.

mod background;
mod check;
mod data_dir;

use std::{
    net::{SocketAddr, TcpListener},
    time::Duration,
};

use anyhow::{Context, Result};
use codelia_policy::IsolationLevel;
use codelia_proto::v1::Run;
use codelia_store::{LocalPostgres, NewKey, Quotas, Scope, Store};
use codelia_telemetry::task;
use codelia_types::{Mode, TenantId};
use secrecy::SecretString;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::data_dir::Home;
use crate::{
    args,
    client::{Client, ClientFile},
    config::{Config, Loaded},
    modes, options,
    output::Output,
    record,
    serve::Page,
    signals,
    spinner::Spinner,
};

pub(crate) use background::down;

/// The tenant of development.
const TENANT: &str = "dev";
const NO_TENANT: &str = "the tenant of development is gone";
const DATABASE: &str = "codelia";
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts everything, tells how to use it, and stops everything when told to.
pub(crate) async fn up(loaded: &Loaded, args: &args::Up, output: Output) -> Result<()> {
    let config = &loaded.config;
    if args.detach {
        return background::start(&config.data_dir).await;
    }
    if args.detached {
        rustix::process::setsid().context("cannot leave the terminal")?;
    }
    let home = Home::open(&config.data_dir)?;
    let _telemetry = codelia_telemetry::init(options::telemetry(config, "codelia", options::TOGETHER)?)?;
    let shutdown = signals::shutdown()?;
    let database = Database::start(config, &home).await?;
    let served = serve(loaded, &home, database.options.clone(), shutdown, output).await;
    let stopped = database.stop().await;
    served.and(stopped)
}

/// The database: our own, or one that is there.
#[derive(Debug)]
struct Database {
    server: Option<LocalPostgres>,
    options: codelia_store::Options,
}

impl Database {
    async fn start(config: &Config, home: &Home) -> Result<Self> {
        if let Some(options) = options::store(config)? {
            return Ok(Self { server: None, options });
        }
        let dir = home.postgres();
        let _spinner = Spinner::start(if dir.exists() {
            "starting the database…"
        } else {
            "creating the database…"
        });
        let server = LocalPostgres::start(&dir).await?;
        let connect = server.database(DATABASE).await?;
        let max_connections = config.database.max_connections.get();
        let options = codelia_store::Options { connect, max_connections, acquire_timeout: ACQUIRE_TIMEOUT };
        Ok(Self { server: Some(server), options })
    }

    async fn stop(self) -> Result<()> {
        match self.server {
            Some(server) => server.stop().await.context("the database did not stop"),
            None => Ok(()),
        }
    }
}

async fn serve(
    loaded: &Loaded,
    home: &Home,
    database: codelia_store::Options,
    shutdown: CancellationToken,
    output: Output,
) -> Result<()> {
    let store = Store::connect(database).await.context("cannot connect to the database")?;
    store.migrate().await?;
    let started = start(loaded, home, &store, &shutdown).await;
    let ended = match started {
        Ok(started) => started.until_stopped(loaded, home, &shutdown, output).await,
        Err(error) => Err(error),
    };
    store.close().await;
    ended
}

/// An api and a worker at work.
#[derive(Debug)]
struct Started {
    services: JoinHandle<Result<()>>,
    key: SecretString,
    told: Told,
}

/// What people are told about it.
#[derive(Debug)]
struct Told {
    endpoint: String,
    key_file: String,
    metrics: Option<String>,
    mode: Mode,
    page: Page,
}

async fn start(loaded: &Loaded, home: &Home, store: &Store, shutdown: &CancellationToken) -> Result<Started> {
    let config = &with_free_ports(loaded);
    let backends = modes::backends(config)?;
    let mode = modes::choose(config, &modes::probe(config, &backends).await)?;
    if mode == Mode::Logical {
        tracing::warn!("runs are not isolated: `codelia doctor` tells what the other modes need");
    }
    let worker_options = options::worker(config, &worker_id(home), home.socket(), options::TOGETHER)?;
    let api_options = options::api(config, mode, options::TOGETHER)?;
    let key = key(store, home).await?;
    if mode == Mode::Logical {
        allow_logical(store).await?;
    }
    let page = Page::open(config.metrics.listen, shutdown.clone()).await?;
    let api = codelia_api::Service::bind(api_options, store.clone()).await?;
    let endpoint = options::endpoint(config, api.local_addr());
    let key_file =
        home.write_client_file(&ClientFile { endpoint: endpoint.clone(), api_key: key.clone() })?;
    let metrics = page.address().map(|address| format!("http://{}/metrics", options::reachable(address)));
    let told = Told { endpoint, key_file: key_file.display().to_string(), metrics, mode, page };
    // Nothing may fail between the worker's start and the task that also ends it.
    let worker = codelia_worker::Service::start(worker_options, store.clone(), backends).await?;
    let services = task::background("services", run_both(api, worker, shutdown.clone()));
    Ok(Started { services, key: key.into(), told })
}

/// Each ends the other: one alone is of no use.
async fn run_both(
    api: codelia_api::Service,
    worker: codelia_worker::Service,
    shutdown: CancellationToken,
) -> Result<()> {
    let api = async {
        let ended = api.serve(shutdown.clone()).await;
        shutdown.cancel();
        ended.context("the api failed")
    };
    let worker = async {
        let ended = worker.run(shutdown.clone()).await;
        shutdown.cancel();
        ended.context("the worker failed")
    };
    let (api, worker) = tokio::join!(api, worker);
    api.and(worker)
}

impl Started {
    async fn until_stopped(
        self,
        loaded: &Loaded,
        home: &Home,
        shutdown: &CancellationToken,
        output: Output,
    ) -> Result<()> {
        let ready = tokio::select! {
            checked = self.check(&loaded.config) => checked.and_then(|run| self.told.tell(loaded, home, &run, output)),
            () = shutdown.cancelled() => Ok(()),
        };
        if ready.is_ok() {
            shutdown.cancelled().await;
        }
        shutdown.cancel();
        let _spinner = Spinner::start("stopping…");
        ready.and(self.services.await?)
    }

    async fn check(&self, config: &Config) -> Result<Run> {
        let ca = config.client.tls_ca.as_deref();
        let client = Client::connect_to(&self.told.endpoint, &self.key, ca).await?;
        check::check(&client).await
    }
}

impl Told {
    fn tell(&self, loaded: &Loaded, home: &Home, run: &Run, output: Output) -> Result<()> {
        self.page.ready();
        let setup_ms = record::millis(run.setup_time.as_ref()).unwrap_or_default();
        let json = json!({
            "ready": self.endpoint,
            "key_file": self.key_file,
            "metrics": self.metrics,
            "data_dir": home.dir(),
            "sandbox_mode": self.mode,
            "self_check": record::run(run),
        });
        output.one(&json, &self.text(loaded, home, run, setup_ms))
    }

    fn text(&self, loaded: &Loaded, home: &Home, run: &Run, setup_ms: f64) -> String {
        let dir = home.dir().display();
        let data_dir = if loaded.is_set("data_dir") { format!(" --data-dir {dir}") } else { String::new() };
        let warning = if self.mode == Mode::Logical { " (isolates nothing: for development)" } else { "" };
        format!(
            "codelia {version}\n\n  \
             endpoint    {endpoint}\n  \
             key         {key}\n  \
             metrics     {metrics}\n  \
             data        {dir}\n  \
             mode        {mode}{warning}\n  \
             self-check  run {run} `echo codelia` exited with 0, set up in {setup_ms:.2} ms\n\n  \
             try         codelia run{data_dir} -- sh -c 'echo hello from $PWD'\n\n\
             ready {endpoint}",
            version = env!("CARGO_PKG_VERSION"),
            endpoint = self.endpoint,
            key = self.key_file,
            metrics = self.metrics.as_deref().unwrap_or("off"),
            mode = self.mode,
            run = run.run_id,
        )
    }
}

/// The key in `client.toml` if it is still good, else a new one for the tenant of development.
async fn key(store: &Store, home: &Home) -> Result<String> {
    if let Some(file) = home.client_file()?
        && store.key_caller(&codelia_api::hash_secret(&file.api_key)).await?.is_some()
    {
        return Ok(file.api_key);
    }
    let tenant: TenantId = TENANT.parse()?;
    if store.tenant_get(&tenant).await?.is_none() {
        match store.tenant_create(&tenant, Quotas::default()).await {
            // Another `up` on the same database was faster.
            Ok(_) | Err(codelia_store::Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let (secret, secret_hash) = codelia_api::generate_secret();
    let new = NewKey { tenant: &tenant, display_name: "codelia up", secret_hash, scopes: &Scope::ALL };
    store.key_create(new).await?.context(NO_TENANT)?;
    Ok(secret)
}

/// Records that the tenant of development may do without isolation: where nothing better can be had, or
/// somebody chose so, it is what it was started for.
async fn allow_logical(store: &Store) -> Result<()> {
    let tenant: TenantId = TENANT.parse()?;
    let known = store.tenant_get(&tenant).await?.context(NO_TENANT)?;
    if known.floor.level > IsolationLevel::None {
        let reason = "codelia up was started in mode logical";
        store.tenant_set_floor(&tenant, IsolationLevel::None, reason, None).await?.context(NO_TENANT)?;
    }
    Ok(())
}

/// A name that two data directories on one host do not share.
fn worker_id(home: &Home) -> String {
    let hash = codelia_api::hash_secret(&home.dir().display().to_string());
    format!("{}-{:02x}{:02x}{:02x}", options::host_name(), hash[0], hash[1], hash[2])
}

/// Addresses nobody asked for give way to others that are there already.
fn with_free_ports(loaded: &Loaded) -> Config {
    let mut config = loaded.config.clone();
    if !loaded.is_set("api.listen") {
        config.api.listen = free(config.api.listen);
    }
    if !loaded.is_set("metrics.listen") {
        config.metrics.listen = config.metrics.listen.map(free);
    }
    config
}

fn free(address: SocketAddr) -> SocketAddr {
    match TcpListener::bind(address) {
        Ok(_) => address,
        Err(_) => SocketAddr::new(address.ip(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_in_use_gives_way_to_a_free_port() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        assert_eq!(free(address).port(), 0);
        drop(taken);
        assert_eq!(free(address), address);
    }
}
