//! An installation for one test: Postgres, apis and workers as separate processes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use codelia_policy::IsolationLevel;
use codelia_store::{NewKey, Quotas, Scope, Store};
use codelia_types::TenantId;
use sha2::{Digest, Sha256};
use sqlx::postgres::PgConnectOptions;
use uuid::Uuid;

use crate::{Client, Database, LeakGuard, Process, Program, Scratch, leak::session_directories};

/// Lease time of the workers. Short, so that a dead worker is detected quickly.
pub const WORKER_LEASE_SECONDS: u64 = 3;

/// The processes of an installation and their settings.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Number of api processes.
    pub apis: usize,
    /// Number of worker processes.
    pub workers: usize,
    /// Slots of each worker.
    pub slots: usize,
    /// Whether all workers share one directory of sessions.
    pub shared_root: bool,
    /// Environment variables of every process.
    pub settings: Vec<(&'static str, String)>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self { apis: 1, workers: 1, slots: 4, shared_root: false, settings: Vec::new() }
    }
}

/// Environment variable with the address of the api and the database of the installation that the
/// tests of a run share. `with-installation` sets it.
pub const SHARED_INSTALLATION: &str = "CODELIA_TEST_INSTALLATION";

/// Its part for one test: its own tenants.
#[derive(Debug)]
struct Shared {
    address: String,
    /// Makes the ids of the test's tenants unique.
    suffix: String,
}

/// A running installation. Call [`Cluster::end`] at the end of the test: it also checks for leaks.
#[derive(Debug)]
pub struct Cluster {
    /// The api processes.
    pub apis: Vec<Api>,
    /// The worker processes.
    pub workers: Vec<Worker>,
    /// Set if the processes belong to the whole test run.
    shared: Option<Shared>,
    options: ClusterOptions,
    program: Program,
    leak_guard: LeakGuard,
    /// The database as a store.
    pub store: Store,
    /// The database.
    pub database: Database,
    scratch: Scratch,
}

/// An api process.
#[derive(Debug)]
pub struct Api {
    /// The process.
    pub process: Process,
    /// The `host:port` that it listens on.
    pub address: String,
    settings: Vec<(String, String)>,
}

/// A worker process.
#[derive(Debug)]
pub struct Worker {
    /// The process.
    pub process: Process,
    /// The worker's id.
    pub id: String,
    /// The directory of its sessions.
    pub root: PathBuf,
    settings: Vec<(String, String)>,
}

impl Cluster {
    /// Starts one api and one worker.
    pub async fn start() -> Result<Self> {
        Self::start_with(ClusterOptions::default()).await
    }

    /// The installation that tests share, with tenants of its own, or a new one if none is shared.
    /// For a test that neither stops nor configures processes and looks only at its own tenants.
    pub async fn shared() -> Result<Self> {
        let Ok(shared) = std::env::var(SHARED_INSTALLATION) else { return Self::start().await };
        let (address, url) = shared.split_once(' ').context(SHARED_INSTALLATION)?;
        let connect: PgConnectOptions = url.parse().context(SHARED_INSTALLATION)?;
        let name = connect.get_database().context(SHARED_INSTALLATION)?.to_owned();
        let database = Database::existing(connect, name);
        let store = database.store().await?;
        let mut cluster = Self::without_processes(database, store, ClusterOptions::default())?;
        let suffix = format!("{:08x}", rand::random::<u32>());
        cluster.shared = Some(Shared { address: address.to_owned(), suffix });
        Ok(cluster)
    }

    /// The value of [`SHARED_INSTALLATION`] that shares this installation.
    #[must_use]
    pub fn share(&self) -> String {
        format!("{} {}", self.apis[0].address, self.database.url())
    }

    /// Starts an installation and waits until every process is ready.
    pub async fn start_with(options: ClusterOptions) -> Result<Self> {
        let (database, store) = Database::migrated().await?;
        Self::start_processes(database, store, options).await
    }

    /// Starts an installation on an empty database.
    pub async fn start_on(database: Database, options: ClusterOptions) -> Result<Self> {
        let store = database.store().await?;
        store.migrate().await?;
        Self::start_processes(database, store, options).await
    }

    async fn start_processes(
        database: Database,
        store: Store,
        options: ClusterOptions,
    ) -> Result<Self> {
        let mut cluster = Self::without_processes(database, store, options)?;
        for _ in 0..cluster.options.workers {
            cluster.add_worker().await?;
        }
        for _ in 0..cluster.options.apis {
            cluster.add_api().await?;
        }
        Ok(cluster)
    }

    fn without_processes(
        database: Database,
        store: Store,
        options: ClusterOptions,
    ) -> Result<Self> {
        let scratch = Scratch::new()?;
        Ok(Self {
            apis: Vec::new(),
            workers: Vec::new(),
            shared: None,
            program: Program::find()?,
            leak_guard: LeakGuard::of(scratch.path()),
            options,
            store,
            database,
            scratch,
        })
    }

    /// Starts processes with this program from now on.
    pub fn use_program(&mut self, program: Program) {
        self.program = program;
    }

    /// Starts another api.
    pub async fn add_api(&mut self) -> Result<()> {
        self.add_api_with(&[("CODELIA_API_LISTEN", "127.0.0.1:0")]).await
    }

    /// Starts another api with additional settings.
    pub async fn add_api_with(&mut self, settings: &[(&str, &str)]) -> Result<()> {
        let api = self.start_api(self.apis.len(), "127.0.0.1:0", owned(settings)).await?;
        self.apis.push(api);
        Ok(())
    }

    /// Restarts an api that has exited, with its address and settings.
    pub async fn restart_api(&mut self, number: usize) -> Result<()> {
        let old = &mut self.apis[number];
        ensure!(old.process.has_ended()?, "api {number} is still running");
        let (address, settings) = (old.address.clone(), old.settings.clone());
        self.apis[number] = self.start_api(number, &address, settings).await?;
        Ok(())
    }

    async fn start_api(
        &self,
        number: usize,
        listen: &str,
        settings: Vec<(String, String)>,
    ) -> Result<Api> {
        let name = format!("api-{number}");
        let mut command = self.command("api", &name)?;
        command
            .env("CODELIA_API_LISTEN", listen)
            .envs(settings.iter().map(|(key, value)| (key, value)));
        let mut process = Process::start(&name, command, self.scratch.path())?;
        let address = address_in(&process.ready().await?)?;
        Ok(Api { process, address, settings })
    }

    /// Starts api and worker in one process, `codelia up`. It counts as an api.
    pub async fn add_up(&mut self) -> Result<()> {
        let mut command = self.command("up", "up")?;
        command
            .env("CODELIA_API_LISTEN", "127.0.0.1:0")
            .env("CODELIA_WORKER_SLOTS", self.options.slots.to_string())
            .env("CODELIA_WORKER_LEASE_TTL", format!("{WORKER_LEASE_SECONDS}s"));
        let mut process = Process::start("up", command, self.scratch.path())?;
        let address = address_in(&process.ready().await?)?;
        self.apis.push(Api { process, address, settings: Vec::new() });
        Ok(())
    }

    /// Starts another worker.
    pub async fn add_worker(&mut self) -> Result<()> {
        self.add_worker_with(&[]).await
    }

    /// Starts another worker with additional settings.
    pub async fn add_worker_with(&mut self, settings: &[(&str, &str)]) -> Result<()> {
        let worker = self.start_worker(self.workers.len(), owned(settings)).await?;
        self.workers.push(worker);
        Ok(())
    }

    /// Restarts a worker that has exited, with its id and settings.
    pub async fn restart_worker(&mut self, number: usize) -> Result<()> {
        let settings = self.workers[number].settings.clone();
        self.replace_worker(number, settings).await
    }

    /// Restarts a worker that has exited, with its id and these settings.
    pub async fn restart_worker_with(
        &mut self,
        number: usize,
        settings: &[(&str, &str)],
    ) -> Result<()> {
        self.replace_worker(number, owned(settings)).await
    }

    async fn replace_worker(
        &mut self,
        number: usize,
        settings: Vec<(String, String)>,
    ) -> Result<()> {
        ensure!(self.workers[number].process.has_ended()?, "worker {number} is still running");
        self.workers[number] = self.start_worker(number, settings).await?;
        Ok(())
    }

    async fn start_worker(&self, number: usize, settings: Vec<(String, String)>) -> Result<Worker> {
        let id = format!("worker-{number}");
        let own_root = settings.iter().find(|(key, _)| key == "CODELIA_SANDBOX_ROOT");
        let shared = if self.options.shared_root { "sessions" } else { &id };
        let root = own_root
            .map_or_else(|| self.scratch.join(shared).join("root"), |(_, root)| root.into());
        // The users of sessions must be able to traverse it, so it is created here.
        fs::create_dir_all(root.parent().context("the sandbox root has no parent")?)?;
        let mut command = self.command("worker", &id)?;
        command
            .env("CODELIA_WORKER_ID", &id)
            .env(
                "CODELIA_WORKER_LISTEN",
                format!("unix:{}", self.scratch.join(&id).join("run/worker.sock").display()),
            )
            .env("CODELIA_WORKER_SLOTS", self.options.slots.to_string())
            // They may name another number of slots.
            .envs(self.options.settings.iter().map(|(name, value)| (name, value)))
            .env("CODELIA_WORKER_LEASE_TTL", format!("{WORKER_LEASE_SECONDS}s"))
            .env("CODELIA_WORKER_POLL_INTERVAL", "200ms")
            .env("CODELIA_SANDBOX_ROOT", &root)
            .envs(settings.iter().map(|(key, value)| (key, value)));
        let mut process = Process::start(&id, command, self.scratch.path())?;
        process.ready().await?;
        Ok(Worker { process, id, root, settings })
    }

    /// Builds a `codelia` command with this installation's settings and a separate data directory.
    pub fn command(&self, subcommand: &str, name: &str) -> Result<std::process::Command> {
        let data = self.scratch.join(name);
        fs::create_dir_all(&data)?;
        let mut command = self.program.command();
        command
            .arg(subcommand)
            .env("CODELIA_DATABASE_URL", self.database.url())
            .env("CODELIA_DATA_DIR", data)
            .env("CODELIA_METRICS_LISTEN", "")
            .env("CODELIA_SANDBOX_UID_REGISTRY", self.scratch.join("uids"))
            .env("CODELIA_INSTANCES_DIR", self.scratch.join("instances"))
            .env("CODELIA_LOG_FILTER", "info")
            // Do not wait long for runs that a test leaves behind.
            .env("CODELIA_WORKER_DRAIN_GRACE", "1s")
            // Most tests need no isolation. The other modes have separate tests.
            .env("CODELIA_SANDBOX_MODE", "logical")
            .envs(self.options.settings.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }

    /// Builds a client command that runs as `client`.
    #[must_use]
    pub fn cli(&self, client: &Client, arguments: &[&str]) -> std::process::Command {
        let mut command = self.program.command();
        command
            .args(arguments)
            .env("CODELIA_DATA_DIR", self.scratch.path())
            .env("CODELIA_ENDPOINT", &client.endpoint)
            .env("CODELIA_API_KEY", &client.secret);
        command
    }

    /// The directory of the test.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.scratch.path()
    }

    /// Finds the processes of this installation.
    #[must_use]
    pub fn leak_guard(&self) -> &LeakGuard {
        &self.leak_guard
    }

    /// Returns the worker with this id.
    ///
    /// # Panics
    /// If it does not exist.
    pub fn worker(&mut self, id: &str) -> &mut Worker {
        self.workers
            .iter_mut()
            .find(|worker| worker.id == id)
            .unwrap_or_else(|| panic!("no worker {id}"))
    }

    /// The `host:port` of an api.
    #[must_use]
    pub fn address(&self, api: usize) -> &str {
        self.shared.as_ref().map_or_else(|| &self.apis[api].address, |shared| &shared.address)
    }

    /// The URL of an api.
    #[must_use]
    pub fn endpoint(&self, api: usize) -> String {
        format!("http://{}", self.address(api))
    }

    /// Creates a tenant with these quotas and a key with all scopes except `operator`.
    pub async fn tenant_with(&self, id: &str, quotas: Quotas) -> Result<Client> {
        let id = self
            .shared
            .as_ref()
            .map_or_else(|| id.to_owned(), |shared| format!("{id}-{}", shared.suffix));
        let tenant: TenantId = id.parse()?;
        self.store.tenant_create(&tenant, quotas).await?;
        self.allow_logical(&tenant).await?;
        let scopes = [Scope::Run, Scope::Files, Scope::Approve, Scope::Audit, Scope::Admin];
        let secret = self.key(&id, &scopes).await?;
        Client::connect(&self.endpoint(0), &secret).await
    }

    /// Most tests use the mode `logical`, which a new tenant may not use.
    async fn allow_logical(&self, tenant: &TenantId) -> Result<()> {
        let tenant =
            self.store.tenant_set_floor(tenant, IsolationLevel::None, None, "a test", None).await?;
        tenant.map(drop).context("tenant not found")
    }

    /// Creates a tenant with default quotas.
    pub async fn tenant(&self, id: &str) -> Result<Client> {
        self.tenant_with(id, Quotas::default()).await
    }

    /// Creates a tenant `operators` and a key with all scopes.
    pub async fn operator(&self) -> Result<Client> {
        let tenant: TenantId = "operators".parse()?;
        self.store.tenant_create(&tenant, Quotas::default()).await?;
        self.allow_logical(&tenant).await?;
        let secret = self.key("operators", Scope::ALL).await?;
        Client::connect(&self.endpoint(0), &secret).await
    }

    /// Creates a key and returns its secret.
    pub async fn key(&self, tenant: &str, scopes: &[Scope]) -> Result<String> {
        let random = format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple());
        let secret = format!("cdl_{}", &random[..43]);
        let key = NewKey {
            tenant: &tenant.parse()?,
            display_name: "test",
            secret_hash: Sha256::digest(&secret).into(),
            scopes,
            expires_at: None,
        };
        self.store.key_create(key).await?.context("tenant not found")?;
        Ok(secret)
    }

    /// Lists the workspaces of the sessions of all workers.
    pub fn session_directories(&self) -> Result<Vec<PathBuf>> {
        let mut roots: Vec<_> = self.workers.iter().map(|worker| worker.root.as_path()).collect();
        roots.dedup();
        let found = roots.into_iter().map(session_directories).collect::<Result<Vec<_>>>()?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Stops every process with SIGTERM.
    pub async fn stop_processes(&mut self) -> Result<()> {
        for api in &mut self.apis {
            stop_process(&mut api.process).await?;
        }
        for worker in &mut self.workers {
            stop_process(&mut worker.process).await?;
        }
        Ok(())
    }

    /// Stops everything and checks for leftovers.
    pub async fn end(mut self) -> Result<()> {
        self.stop_processes().await?;
        self.leak_guard.expect_no_processes().await;
        self.store.close().await;
        if self.shared.is_some() { Ok(()) } else { self.database.end().await }
    }
}

fn owned(settings: &[(&str, &str)]) -> Vec<(String, String)> {
    settings.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Stops a process unless the test already did.
async fn stop_process(process: &mut Process) -> Result<()> {
    if process.has_ended()? {
        return Ok(());
    }
    let status = process.terminate().await?;
    ensure!(status.success(), "{process:?} exited with {status}:\n{}", process.read_log());
    Ok(())
}

/// Finds the `host:port` in a line such as `ready … 127.0.0.1:7300`.
pub(crate) fn address_in(line: &str) -> Result<String> {
    let words = line.split(|c: char| c.is_whitespace() || c == '=' || c == '/' || c == ',');
    let address = words
        .map(|word| word.trim_matches(['.', ';', ')', '(']))
        .find(|word| word.parse::<std::net::SocketAddr>().is_ok());
    address.map(ToOwned::to_owned).with_context(|| format!("no address in {line:?}"))
}
