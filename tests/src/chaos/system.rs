//! The installation under test: processes that each reach one Postgres through their own proxy, and
//! apis that reach each worker through a proxy, with TLS.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::DrainWorkerRequest;
use codelia_store::{Quotas, Scope};
use rustix::process::Signal;
use sqlx::Connection;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    DisabledSafeguard, Options, POLL_INTERVAL,
    database::TestDatabase,
    defect::Defect,
    disk::{Disk, WORKER_DISK},
    fault_log::{FaultLog, RENEWAL_OBSERVER},
    load::Callers,
    plan::{APIS, Fault, FaultEvent, Round, SMALL_DISK_WORKER, WORKERS},
};
use crate::{
    Certificates, Client, Cluster, ClusterOptions, ENGINE_SOCKET, PgBouncer, Process, Proxy,
    ProxyMode, ProxySide, ProxyTarget,
};

/// How long to wait for a database that recovers.
const EXEMPT_TIMEOUT: Duration = Duration::from_secs(3);

/// The ids of the tenants.
pub(crate) const TENANT_NAMES: [&str; 2] = ["chaos", "other"];

/// Records every end of a run: whether a worker committed it, and whether it held the lease.
const END_OBSERVER: &str = "
CREATE TABLE chaos_ends (run_id uuid NOT NULL, by_worker boolean NOT NULL, authorized boolean NOT NULL);
CREATE FUNCTION chaos_observe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_ends VALUES (NEW.id, NEW.result ? 'receipt',
        NOT NEW.result ? 'receipt' OR (current_setting('chaos.process', true) = NEW.worker_id AND EXISTS (
            SELECT 1 FROM sessions s JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
            WHERE s.id = NEW.session_id AND s.lease_worker = NEW.worker_id AND s.lease_incarnation = NEW.incarnation
              AND s.lease_epoch = NEW.lease_epoch AND w.lease_until > now())));
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_observer AFTER INSERT ON ended_runs FOR EACH ROW EXECUTE FUNCTION chaos_observe();
";

pub(crate) struct TestSystem {
    /// Dropped first: it is mounted in the cluster's directory.
    disk: Disk,
    pub(crate) cluster: Cluster,
    /// Callers of each tenant.
    pub(crate) callers: Vec<Callers>,
    operator: Client,
    /// Proxies from the workers, then from the apis, to Postgres.
    pub(crate) proxies: Vec<Proxy>,
    /// Proxies from the apis to each worker.
    links: Vec<Proxy>,
    /// Incarnations whose commands may have outlived their lease: they were paused, or the clock of
    /// the database jumped.
    pub(crate) exempt: BTreeSet<Uuid>,
    pub(crate) log: FaultLog,
    /// Process ids of all workers so far.
    pub(crate) pids: BTreeSet<u32>,
    database: TestDatabase,
}

impl TestSystem {
    pub(crate) async fn start(options: &Options) -> Result<Self> {
        let (disabled, defects) = (options.disabled, &options.defects);
        let (mut database, empty) = TestDatabase::start(&options.faults).await?;
        let mut cluster = Cluster::start_on(empty, cluster_options()).await?;
        let (workers, apis) = process_names();
        if options.pooler {
            let all: Vec<_> = workers.iter().chain(&apis).cloned().collect();
            database.start_pooler(cluster.database.name(), &all)?;
        }
        for statements in [END_OBSERVER, RENEWAL_OBSERVER] {
            cluster.database.execute(statements).await?;
        }
        let planted = defects.iter().filter_map(|defect| defect.statements());
        for statements in disabled.statements().into_iter().chain(planted) {
            cluster.database.execute(statements).await?;
        }
        let disk = Disk::mount(&cluster.directory().join("small"), WORKER_DISK)?;
        let (mut proxies, mut links) = (Vec::new(), Vec::new());
        let mut shared = internal_tls(&cluster)?;
        shared.push(("CODELIA_OUTPUT_INLINE", "16 KiB".to_owned()));
        // The faults fill a small disk to the last byte.
        shared.push(("CODELIA_WORKER_DISK_RESERVE", "0".to_owned()));
        shared.push((
            "CODELIA_OUTPUT_STORE",
            format!("file://{}", output_directory(&cluster).display()),
        ));
        shared
            .extend(options.pooler.then(|| ("CODELIA_DATABASE_POOLER", "transaction".to_owned())));
        for (number, name) in workers.iter().enumerate() {
            let proxy = Proxy::to(database.target(), disabled.replacements())?;
            let address = worker_address();
            let link = Proxy::to(ProxyTarget::Tcp(address.clone()), &[])?;
            let url = database_url(&database, &cluster, name, &proxy);
            let own = [
                ("CODELIA_DATABASE_URL", url.as_str()),
                ("CODELIA_WORKER_LISTEN", &address),
                ("CODELIA_WORKER_ADVERTISE", &format!("https://127.0.0.1:{}", link.port())),
            ];
            add_worker(&mut cluster, number, disabled, &shared, &own).await?;
            proxies.push(proxy);
            links.push(link);
        }
        for name in &apis {
            let proxy = Proxy::to(database.target(), &[])?;
            let url = database_url(&database, &cluster, name, &proxy);
            let mut settings = vec![("CODELIA_DATABASE_URL", url.as_str())];
            settings.extend(shared.iter().map(|(name, value)| (*name, value.as_str())));
            cluster.add_api_with(&settings).await?;
            proxies.push(proxy);
        }
        let (callers, operator) = callers(&cluster, defects).await?;
        let pids = cluster.workers.iter().map(|worker| worker.process.pid()).collect();
        let pooler_retry =
            if options.pooler { f64::from(PgBouncer::LOGIN_RETRY_SECONDS) } else { 0.0 };
        let (exempt, log) = (BTreeSet::new(), FaultLog { pooler_retry, ..FaultLog::default() });
        Ok(Self { disk, cluster, callers, operator, proxies, links, exempt, log, pids, database })
    }

    /// Starts the faults of a round.
    pub(crate) async fn start_faults(&mut self, round: &Round) -> Result<()> {
        for event in &round.faults {
            self.log.begin(*event)?;
            self.start_fault(*event).await.with_context(|| format!("start {event:?}"))?;
        }
        Ok(())
    }

    /// Ends the faults of a round: Postgres first, then connections, then processes.
    pub(crate) async fn end_faults(&mut self, round: &Round) -> Result<()> {
        let mut events = round.faults.clone();
        events.sort_by_key(|event| match event.fault {
            Fault::FullDatabaseDisk => 0,
            Fault::StopPostgres | Fault::CrashPostgres | Fault::KillBackend | Fault::Failover => 1,
            Fault::KillWorker
            | Fault::KillApi
            | Fault::RestartApi
            | Fault::Drain
            | Fault::RollingRestart => 3,
            _ => 2,
        });
        for event in events {
            self.end_fault(event).await.with_context(|| format!("end {event:?}"))?;
            self.log.end(event)?;
        }
        Ok(())
    }

    async fn start_fault(&mut self, FaultEvent { fault, target }: FaultEvent) -> Result<()> {
        match fault {
            Fault::KillWorker => kill(&mut self.cluster.workers[target].process).await?,
            Fault::KillApi => kill(&mut self.cluster.apis[target].process).await?,
            Fault::RestartApi => terminate(&mut self.cluster.apis[target].process).await?,
            Fault::PauseWorker => self.pause(target).await?,
            Fault::ClockForward | Fault::ClockBackward => {
                self.exempt_all().await?;
                self.database.start_fault(fault, target).await?;
            }
            Fault::StopPostgres
            | Fault::CrashPostgres
            | Fault::KillBackend
            | Fault::FullDatabaseDisk
            | Fault::Failover => self.database.start_fault(fault, target).await?,
            Fault::Cut => self.proxies[target].cut(),
            Fault::Partition => self.proxies[target].set(ProxyMode::Closed),
            Fault::Stall => self.proxies[target].set(ProxyMode::Stalled),
            Fault::CutWorker => self.links[target].cut(),
            Fault::StallWorker => self.links[target].set(ProxyMode::Stalled),
            Fault::HalfOpen => {
                let closed = if target < WORKERS { ProxySide::Server } else { ProxySide::Client };
                self.links[target % WORKERS].half_open(closed);
            }
            Fault::FullDisk => self.disk.fill()?,
            Fault::Drain => self.drain(target).await?,
            Fault::RollingRestart => {}
        }
        Ok(())
    }

    async fn end_fault(&mut self, FaultEvent { fault, target }: FaultEvent) -> Result<()> {
        match fault {
            Fault::KillWorker => self.start_if_exited(target).await?,
            Fault::KillApi | Fault::RestartApi => {
                if self.cluster.apis[target].process.has_ended()? {
                    self.cluster.restart_api(target).await?;
                }
            }
            Fault::PauseWorker => {
                let process = &mut self.cluster.workers[target].process;
                if !process.has_ended()? {
                    process.signal(Signal::CONT)?;
                }
            }
            Fault::ClockForward | Fault::ClockBackward => {
                self.exempt_all().await?;
                self.database.end_fault(fault).await?;
            }
            Fault::StopPostgres
            | Fault::CrashPostgres
            | Fault::KillBackend
            | Fault::FullDatabaseDisk => {
                self.database.end_fault(fault).await?;
            }
            Fault::Failover => {
                self.database.end_fault(fault).await?;
                self.proxies.iter().for_each(|proxy| proxy.redirect(self.database.target()));
            }
            Fault::Cut | Fault::CutWorker | Fault::HalfOpen => {}
            Fault::Partition | Fault::Stall => self.proxies[target].set(ProxyMode::Open),
            Fault::StallWorker => self.links[target].set(ProxyMode::Open),
            Fault::FullDisk => self.disk.free()?,
            Fault::Drain => self.restart(target).await?,
            Fault::RollingRestart => {
                for worker in 0..WORKERS {
                    self.restart(worker).await?;
                }
            }
        }
        Ok(())
    }

    async fn pause(&mut self, target: usize) -> Result<()> {
        let worker = &mut self.cluster.workers[target];
        if worker.process.has_ended()? {
            return Ok(());
        }
        worker.process.signal(Signal::STOP)?;
        // The paused worker cannot change its row, so this is its current incarnation.
        let id = worker.id.clone();
        self.exempt(&[id]).await
    }

    async fn exempt_all(&mut self) -> Result<()> {
        let ids: Vec<_> = self.cluster.workers.iter().map(|worker| worker.id.clone()).collect();
        self.exempt(&ids).await
    }

    /// Exempts the current incarnations from the check that no command outlives its lease, if the
    /// database answers.
    async fn exempt(&mut self, ids: &[String]) -> Result<()> {
        if !self.database.is_running()? {
            return Ok(());
        }
        let deadline = Instant::now() + EXEMPT_TIMEOUT;
        loop {
            match self.cluster.database.connection().await {
                Ok(mut connection) => {
                    let query = "SELECT incarnation FROM workers WHERE id = ANY ($1)";
                    let current: Vec<Uuid> =
                        sqlx::query_scalar(query).bind(ids).fetch_all(&mut connection).await?;
                    self.exempt.extend(current);
                    return Ok(connection.close().await?);
                }
                Err(_) if Instant::now() < deadline => sleep(POLL_INTERVAL).await,
                Err(_) => return Ok(()),
            }
        }
    }

    /// Drains a worker as an operator. Fails silently without a database or an api.
    async fn drain(&mut self, target: usize) -> Result<()> {
        let name = format!("workers/{}", self.cluster.workers[target].id);
        if let Err(status) = self.operator.admin().drain_worker(DrainWorkerRequest { name }).await {
            eprintln!("drain failed: {}", status.message());
        }
        Ok(())
    }

    /// Stops a worker with SIGTERM and starts it again.
    async fn restart(&mut self, target: usize) -> Result<()> {
        terminate(&mut self.cluster.workers[target].process).await?;
        self.start_if_exited(target).await
    }

    async fn start_if_exited(&mut self, target: usize) -> Result<()> {
        if self.cluster.workers[target].process.has_ended()? {
            self.cluster.restart_worker(target).await?;
            self.pids.insert(self.cluster.workers[target].process.pid());
        }
        Ok(())
    }

    /// The directories of the workers' sessions.
    pub(crate) fn roots(&self) -> BTreeSet<PathBuf> {
        self.cluster.workers.iter().map(|worker| worker.root.clone()).collect()
    }

    /// Plants defects that happen once, in the middle of the load.
    pub(crate) async fn plant(&mut self, defects: &[Defect]) -> Result<()> {
        if defects.contains(&Defect::LeaseEnded) {
            let end = "UPDATE workers SET lease_until = now() - interval '1 second'";
            self.cluster.database.execute(end).await?;
        }
        Ok(())
    }

    pub(crate) async fn stop_processes(&mut self) -> Result<()> {
        self.cluster.stop_processes().await
    }

    /// Removes everything else after the processes were stopped.
    pub(crate) async fn end(mut self) -> Result<()> {
        // Unmount first: ending the cluster removes its directory.
        self.disk.unmount()?;
        self.cluster.end().await?;
        self.database.end().await
    }
}

/// Adds a worker. The last one has a small disk.
async fn add_worker(
    cluster: &mut Cluster,
    number: usize,
    disabled: DisabledSafeguard,
    shared: &[(&'static str, String)],
    own: &[(&str, &str)],
) -> Result<()> {
    let root = cluster.directory().join("small/root").display().to_string();
    let mut settings = own.to_vec();
    settings.extend(shared.iter().map(|(name, value)| (*name, value.as_str())));
    settings
        .extend((number == SMALL_DISK_WORKER).then_some(("CODELIA_SANDBOX_ROOT", root.as_str())));
    settings.extend(disabled.settings());
    cluster.add_worker_with(&settings).await
}

/// Certificates for connections between apis and workers.
fn internal_tls(cluster: &Cluster) -> Result<Vec<(&'static str, String)>> {
    let directory = cluster.directory();
    Certificates::new()?.write(directory, "inside", &["codelia-worker"])?;
    let files = [
        ("CODELIA_INTERNAL_TLS_CA", "inside-ca.pem"),
        ("CODELIA_INTERNAL_TLS_CERT", "inside.pem"),
        ("CODELIA_INTERNAL_TLS_KEY", "inside.key"),
    ];
    Ok(files.map(|(name, file)| (name, directory.join(file).display().to_string())).to_vec())
}

/// Where large output of all processes goes.
pub(crate) fn output_directory(cluster: &Cluster) -> PathBuf {
    cluster.directory().join("output")
}

/// The address that a worker listens on. No other process uses its host, and no other worker its
/// port, so that it is free after a restart.
fn worker_address() -> String {
    static NEXT_PORT: AtomicU16 = AtomicU16::new(7400);
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.64.{high}.{low}:{}", NEXT_PORT.fetch_add(1, Ordering::Relaxed))
}

fn cluster_options() -> ClusterOptions {
    let settings = vec![
        ("CODELIA_WORKER_DRAIN_GRACE", "10s".to_owned()),
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", std::env::var(ENGINE_SOCKET).unwrap_or_default()),
    ];
    ClusterOptions { apis: 0, workers: 0, slots: 6, shared_root: true, settings }
}

/// The names of the workers and of the apis.
fn process_names() -> (Vec<String>, Vec<String>) {
    let names =
        |kind: &str, count: usize| (0..count).map(|number| format!("{kind}-{number}")).collect();
    (names("worker", WORKERS), names("api", APIS))
}

/// The URL of the database via the proxy. A setting of its connections identifies the process.
fn database_url(
    database: &TestDatabase,
    cluster: &Cluster,
    process: &str,
    proxy: &Proxy,
) -> String {
    let name = database.name_for(process, cluster.database.name());
    format!("postgres://codelia@127.0.0.1:{}/{name}", proxy.port())
}

/// Callers of both tenants, and an operator.
async fn callers(cluster: &Cluster, defects: &[Defect]) -> Result<(Vec<Callers>, Client)> {
    let quotas = Quotas { concurrent_runs: 100_000, queued_runs: 100_000, ..Quotas::default() };
    let mut clients = Vec::new();
    for tenant in TENANT_NAMES {
        let first = cluster.tenant_with(tenant, quotas).await?;
        let mut own = vec![first.clone()];
        for api in 1..APIS {
            own.push(Client::connect(&cluster.endpoint(api), &first.secret).await?);
        }
        clients.push(own);
    }
    let callers = |tenant: usize| Callers {
        tenant,
        clients: clients[tenant].clone(),
        others: clients[if defects.contains(&Defect::SharedKey) { tenant } else { 1 - tenant }]
            .clone(),
        watch_overlap: i64::from(defects.contains(&Defect::WatchOverlap)),
    };
    let secret = cluster.key(TENANT_NAMES[0], Scope::ALL).await?;
    let operator = clients[0][0].with_secret(&secret)?;
    Ok(((0..TENANT_NAMES.len()).map(callers).collect(), operator))
}

async fn kill(process: &mut Process) -> Result<()> {
    if !process.has_ended()? {
        process.signal(Signal::KILL)?;
        process.exited().await?;
    }
    Ok(())
}

async fn terminate(process: &mut Process) -> Result<()> {
    if !process.has_ended()? {
        let status = process.terminate().await?;
        ensure!(status.success(), "{status}:\n{}", process.read_log());
    }
    Ok(())
}
