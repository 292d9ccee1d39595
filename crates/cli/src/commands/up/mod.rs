//! `codelia up`: database, API and worker on one machine, self-checked before it prints `ready`.

mod background;
mod check;
mod data_dir;
mod instances;

use std::{
    net::{SocketAddr, TcpListener},
    time::Duration,
};

use anyhow::{Context, Result};
use codelia_client::{
    client::{Client, ClientFile},
    output::Output,
    run_record, signals,
    spinner::Spinner,
    units,
};
use codelia_policy::limits_remedy;
use codelia_proto::v1::Run;
use codelia_store::{KeyStanding, LocalPostgres, NewKey, OutputLocation, Quotas, Scope, Store};
use codelia_telemetry::task;
use codelia_types::{Mode, TenantId};
use secrecy::SecretString;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::data_dir::DataDir;
use super::serve::{MetricsServer, protect_memory};
use crate::{
    args,
    backends::{self, ChosenMode},
    config::{Config, Loaded},
    delegation, host, options,
};

pub(crate) use background::down;
pub(crate) use data_dir::create as create_data_dir;

/// Tenant that `up` creates.
const TENANT: &str = "dev";
const NO_TENANT: &str = "tenant \"dev\" not found";
const LOG_FILTER: &str = "warn,codelia_worker::sandbox::backends=error";
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Name of the private database.
const DATABASE: &str = "codelia";

/// Starts everything, prints how to use it, and stops everything on a termination signal.
pub(crate) async fn up(mut loaded: Loaded, args: &args::Up, output: Output) -> Result<()> {
    set_defaults(&mut loaded.config);
    let loaded = &loaded;
    let config = &loaded.config;
    if args.detach {
        return background::start(&config.data_dir).await;
    }
    delegation::enter(config).await?;
    if args.detached {
        rustix::process::setsid().context("cannot detach from the terminal")?;
    }
    protect_memory()?;
    let data_dir = DataDir::open(&config.data_dir)?;
    let _telemetry = codelia_telemetry::init("codelia", &config.log, &config.otlp)?;
    let _registration = instances::register(config, &data_dir.path).inspect_err(|error| {
        tracing::warn!("`codelia down` will need --data-dir: {error:#}");
    });
    host::raise_open_files()?;
    let shutdown = signals::shutdown()?;
    let database = Database::start(config, &data_dir).await?;
    let served = serve(loaded, &data_dir, &database, shutdown, output).await;
    let stopped = database.stop().await;
    served.and(stopped)
}

/// Sets the defaults that differ from those of separate processes: a user waits for the end, and
/// the banner reports the mode, so the worker's warnings about other modes are hidden.
fn set_defaults(config: &mut Config) {
    config.log.filter.get_or_insert_with(|| LOG_FILTER.to_owned());
    config.worker.drain_grace.get_or_insert(SHUTDOWN_GRACE);
}

/// The database: a private server, or the configured one.
#[derive(Debug)]
struct Database {
    server: Option<LocalPostgres>,
    options: codelia_store::Options,
}

impl Database {
    async fn start(config: &Config, data_dir: &DataDir) -> Result<Self> {
        let mut options = config.database.clone();
        if options.url.is_some() {
            return Ok(Self { server: None, options });
        }
        let dir = data_dir.postgres();
        let _spinner = Spinner::start(if dir.exists() {
            "starting the database…"
        } else {
            "creating the database…"
        });
        let server = LocalPostgres::start(&dir).await?;
        options.url = Some(server.database(DATABASE).await?.into());
        Ok(Self { server: Some(server), options })
    }

    async fn stop(self) -> Result<()> {
        match self.server {
            Some(server) => server.stop().await.context("cannot stop the database"),
            None => Ok(()),
        }
    }
}

async fn serve(
    loaded: &Loaded,
    data_dir: &DataDir,
    database: &Database,
    shutdown: CancellationToken,
    output: Output,
) -> Result<()> {
    let mut stored = loaded.config.output.clone();
    // Other processes may use a configured database, and need not have this disk.
    if database.server.is_some() {
        stored.store.get_or_insert_with(|| OutputLocation::Directory(data_dir.output()));
    }
    let store =
        Store::connect(database.options.clone()).await.context("cannot connect to the database")?;
    store.migrate().await?;
    let config = with_secret_key(loaded, data_dir)?;
    let key = config.secrets.key()?;
    let store = store.with_output(&stored).await?.with_audit_key(key.as_ref())?;
    let started = start(config, data_dir, &store, &shutdown).await;
    let result = match started {
        Ok(services) => services.run(loaded, data_dir, &shutdown, output).await,
        Err(error) => Err(error),
    };
    store.close().await;
    result
}

/// A running API server and worker.
#[derive(Debug)]
struct Services {
    task: JoinHandle<Result<()>>,
    key: SecretString,
    metrics: MetricsServer,
    worker: codelia_worker::Health,
    banner: Banner,
}

/// The message that `up` prints when it is ready.
#[derive(Debug)]
struct Banner {
    endpoint: String,
    key_file: String,
    metrics: Option<String>,
    chosen: ChosenMode,
    /// Whether limits of runs are watched instead of enforced.
    watches_limits: bool,
}

/// The configuration with free ports and, unless one is configured, this installation's own key.
fn with_secret_key(loaded: &Loaded, data_dir: &DataDir) -> Result<Config> {
    let mut config = with_free_ports(loaded);
    if config.secrets.key_file.is_none() {
        config.secrets.key_file = Some(data_dir.secret_key_file()?);
    }
    Ok(config)
}

async fn start(
    config: Config,
    data_dir: &DataDir,
    store: &Store,
    shutdown: &CancellationToken,
) -> Result<Services> {
    let config = &backends::watching_if_needed(&config);
    let uids = options::reserve_uids(config)?;
    let backends = backends::create(config, uids)?;
    let probed = backends::probe(config, &backends).await;
    let chosen = backends::choose_mode(config, &probed)?;
    let mode = chosen.mode;
    let watches_limits = probed.iter().any(|one| one.mode == mode && one.watches_limits());
    let worker_options = options::worker(config, &worker_id(data_dir), &data_dir.socket, uids)?;
    let mut api_options = options::api(config, mode)?;
    let key = api_key(store, data_dir).await?;
    if mode == Mode::Logical {
        // Not stored: it ends with this process.
        api_options.unisolated_tenant = Some(TENANT.parse()?);
    }
    let metrics = MetricsServer::start(config, shutdown.clone()).await?;
    let api = codelia_api::Service::bind(api_options, store.clone()).await?;
    let endpoint = options::endpoint(config, api.local_addr());
    let key_file = data_dir
        .write_client_file(&ClientFile { endpoint: endpoint.clone(), api_key: key.clone() })?;
    let metrics_url =
        metrics.address.map(|address| format!("http://{}/metrics", options::reachable(address)));
    let banner = Banner {
        endpoint,
        key_file: key_file.display().to_string(),
        metrics: metrics_url,
        chosen,
        watches_limits,
    };
    // Nothing may fail between the start of the worker and the task that stops it.
    let worker = codelia_worker::Service::start(worker_options, store.clone(), backends).await?;
    api.add_local_worker(worker.address(), worker.services());
    let health = worker.health();
    let task = task::background("services", run_both(api, worker, shutdown.clone()));
    Ok(Services { task, key: key.into(), metrics, worker: health, banner })
}

/// Runs API server and worker until both have stopped. If one stops, so does the other.
async fn run_both(
    api: codelia_api::Service,
    worker: codelia_worker::Service,
    shutdown: CancellationToken,
) -> Result<()> {
    let api = async {
        let result = api.serve(shutdown.clone()).await;
        shutdown.cancel();
        result.context("API server failed")
    };
    let worker = async {
        let result = worker.run(shutdown.clone()).await;
        shutdown.cancel();
        result.context("worker failed")
    };
    let (api, worker) = tokio::join!(api, worker);
    api.and(worker)
}

impl Services {
    /// Checks the services, prints the banner and waits until they have stopped.
    async fn run(
        self,
        loaded: &Loaded,
        data_dir: &DataDir,
        shutdown: &CancellationToken,
        output: Output,
    ) -> Result<()> {
        let ready = tokio::select! {
            checked = self.check(&loaded.config) => checked.and_then(|run| {
                self.metrics.set_started(Some(self.worker.clone()));
                self.banner.print(loaded, data_dir, &run, output)
            }),
            () = shutdown.cancelled() => Ok(()),
        };
        if ready.is_ok() {
            shutdown.cancelled().await;
        }
        shutdown.cancel();
        let _spinner = Spinner::start("stopping…");
        ready.and(self.task.await?)
    }

    async fn check(&self, config: &Config) -> Result<Run> {
        let ca = config.client.tls_ca.as_deref();
        let client = Client::connect_to(&self.banner.endpoint, &self.key, ca).await?;
        check::check(&client).await
    }
}

impl Banner {
    /// Prints the banner. `run` is the run of the self-check.
    fn print(&self, loaded: &Loaded, data_dir: &DataDir, run: &Run, output: Output) -> Result<()> {
        let json = json!({
            "ready": self.endpoint,
            "keyFile": self.key_file,
            "metrics": self.metrics,
            "dataDir": &data_dir.path,
            "mode": self.chosen.mode,
            "passedOverModes": self.chosen.passed_over.iter().map(|(mode, problem)| {
                json!({ "mode": mode, "problem": problem })
            }).collect::<Vec<_>>(),
            "watchesLimits": self.watches_limits,
            "selfCheck": run_record(run)?,
        });
        output.print(&json, &self.text(loaded, data_dir, run))
    }

    /// A line about limits that are not enforced.
    fn limits(&self) -> String {
        let remedy = limits_remedy(self.chosen.mode, true);
        let line = format!("  limits      watched, not enforced: no writable cgroup; {remedy}\n");
        if self.watches_limits { line } else { String::new() }
    }

    fn text(&self, loaded: &Loaded, data_dir: &DataDir, run: &Run) -> String {
        let dir = data_dir.path.display();
        let flag =
            if loaded.is_set("data_dir") { format!(" --data-dir {dir}") } else { String::new() };
        format!(
            "codelia {version}\n\n  \
             endpoint    {endpoint}\n  \
             key         {key}\n  \
             metrics     {metrics}\n  \
             data        {dir}\n  \
             {mode}\
             {limits}  \
             self-check  run {run} `echo codelia` exited with 0, sandbox ready in {setup_ms:.2} ms\n\n  \
             try         codelia run{flag} -- sh -c 'echo hello from $PWD'\n\n\
             ready {endpoint}",
            version = env!("CARGO_PKG_VERSION"),
            endpoint = self.endpoint,
            key = self.key_file,
            metrics = self.metrics.as_deref().unwrap_or("off"),
            mode = mode_lines(&self.chosen),
            limits = self.limits(),
            run = run.run_id,
            setup_ms = units::millis(run.setup_time.as_ref()).unwrap_or_default(),
        )
    }
}

/// The mode and why it was chosen: what the modes lack that would be preferred.
fn mode_lines(chosen: &ChosenMode) -> String {
    let reason = match chosen {
        ChosenMode { mode: Mode::Logical, .. } => "no isolation: for development only",
        ChosenMode { is_configured: true, .. } => "configured",
        ChosenMode { passed_over, .. } if passed_over.is_empty() => "default",
        ChosenMode { .. } => "the best one that works here",
    };
    let passed_over = chosen.passed_over.iter();
    let passed_over =
        passed_over.map(|(mode, problem)| format!("  not {:7} {problem}\n", mode.as_str()));
    format!("mode        {} ({reason})\n{}", chosen.mode, passed_over.collect::<String>())
}

/// Returns the key in `client.toml` if it is valid, or a new key of the development tenant.
async fn api_key(store: &Store, data_dir: &DataDir) -> Result<String> {
    if let Some(file) = ClientFile::read(&data_dir.path)?
        && let Some(found) =
            store.key_authenticate(&codelia_api::hash_secret(&file.api_key)).await?
        && found.standing == KeyStanding::Valid
    {
        return Ok(file.api_key);
    }
    let tenant: TenantId = TENANT.parse()?;
    if store.tenant_get(&tenant).await?.is_none() {
        match store.tenant_create(&tenant, Quotas::default()).await {
            // Another `up` on the same database may have created it.
            Ok(_) | Err(codelia_store::Error::AlreadyExists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let (secret, secret_hash) = codelia_api::generate_secret();
    let new = NewKey {
        tenant: &tenant,
        display_name: "codelia up",
        secret_hash,
        scopes: Scope::ALL,
        expires_at: None,
    };
    store.key_create(new).await?.context(NO_TENANT)?;
    Ok(secret)
}

/// Returns a worker id that is unique to the host and data directory.
fn worker_id(data_dir: &DataDir) -> String {
    let hash = codelia_api::hash_secret(&data_dir.path.display().to_string());
    format!("{}-{}", host::host_id(), hex::encode(&hash[..3]))
}

/// Replaces default ports that are in use by free ones. Configured ports stay as they are.
fn with_free_ports(loaded: &Loaded) -> Config {
    let mut config = loaded.config.clone();
    if !loaded.is_set("api.listen") {
        config.api.listen = free_address(config.api.listen);
    }
    if !loaded.is_set("metrics.listen") {
        config.metrics.listen = config.metrics.listen.map(free_address);
    }
    config
}

/// Returns the address, or port 0 if its port is in use.
fn free_address(address: SocketAddr) -> SocketAddr {
    match TcpListener::bind(address) {
        Ok(_) => address,
        Err(_) => SocketAddr::new(address.ip(), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banner_says_why_a_mode_was_chosen() {
        let chosen = |mode, is_configured, passed_over| {
            mode_lines(&ChosenMode { mode, is_configured, passed_over })
        };
        assert_eq!(chosen(Mode::Native, false, Vec::new()), "mode        native (default)\n");
        assert_eq!(chosen(Mode::Nsjail, true, Vec::new()), "mode        nsjail (configured)\n");
        let problem = "user namespaces (allow them)".to_owned();
        assert_eq!(
            chosen(Mode::Bwrap, false, vec![(Mode::Native, problem)]),
            "mode        bwrap (the best one that works here)\n  not native  user namespaces (allow them)\n"
        );
    }

    #[test]
    fn port_in_use_is_replaced() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        assert_eq!(free_address(address).port(), 0);
        drop(taken);
        assert_eq!(free_address(address), address);
    }
}
