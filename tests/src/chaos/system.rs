//! The installation under test: processes that each reach one Postgres through their own proxy.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::DrainWorkerRequest;
use codelia_store::{LocalPostgres, Quotas, Scope};
use rustix::process::Signal;
use sqlx::Connection;
use uuid::Uuid;

use super::{
    DisabledSafeguard,
    disk::Disk,
    load::Callers,
    plan::{APIS, Fault, FaultEvent, Round, SMALL_DISK_WORKER, WORKERS},
};
use crate::{Client, Cluster, ClusterOptions, Database, ENGINE_SOCKET, Process, Proxy, ProxyMode, Scratch};

/// Records every end of a run: whether a worker committed it, and whether it held the lease.
const END_OBSERVER: &str = "
CREATE TABLE chaos_ends (run_id uuid NOT NULL, by_worker boolean NOT NULL, authorized boolean NOT NULL);
CREATE FUNCTION chaos_observe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_ends VALUES (NEW.id, NEW.receipt IS NOT NULL,
        NEW.receipt IS NULL OR (current_setting('chaos.process', true) = NEW.worker_id AND EXISTS (
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
    pub(crate) callers: Callers,
    operator: Client,
    server: Option<LocalPostgres>,
    /// Proxies of the workers, then of the apis.
    pub(crate) proxies: Vec<Proxy>,
    /// Incarnations of workers that were paused.
    pub(crate) paused: BTreeSet<Uuid>,
    /// Process ids of all workers so far.
    pub(crate) pids: BTreeSet<u32>,
    scratch: Scratch,
}

impl TestSystem {
    pub(crate) async fn start(disabled: DisabledSafeguard) -> Result<Self> {
        let scratch = Scratch::new()?;
        let server = LocalPostgres::start(&scratch.join("postgres")).await?;
        let database = Database::on(&server).await?;
        let mut cluster = Cluster::start_on(database, cluster_options()).await?;
        cluster.database.execute(END_OBSERVER).await?;
        if let Some(statements) = disabled.statements() {
            cluster.database.execute(statements).await?;
        }
        let disk = Disk::mount(&cluster.directory().join("small"))?;
        let mut proxies = Vec::new();
        for number in 0..WORKERS {
            let proxy = Proxy::start(&scratch.join("postgres"), disabled.replacements())?;
            let url = database_url(&cluster, &format!("worker-{number}"), &proxy);
            let root = cluster.directory().join("small/root").display().to_string();
            let mut settings = vec![("CODELIA_DATABASE_URL", url.as_str())];
            settings.extend((number == SMALL_DISK_WORKER).then_some(("CODELIA_SANDBOX_ROOT", root.as_str())));
            settings.extend(disabled.settings());
            cluster.add_worker_with(&settings).await?;
            proxies.push(proxy);
        }
        for number in 0..APIS {
            let proxy = Proxy::start(&scratch.join("postgres"), &[])?;
            let url = database_url(&cluster, &format!("api-{number}"), &proxy);
            cluster.add_api_with(&[("CODELIA_DATABASE_URL", &url)]).await?;
            proxies.push(proxy);
        }
        let (callers, operator) = callers(&cluster).await?;
        let pids = cluster.workers.iter().map(|worker| worker.process.pid()).collect();
        let paused = BTreeSet::new();
        Ok(Self { cluster, callers, operator, server: Some(server), proxies, disk, paused, pids, scratch })
    }

    /// Starts the faults of a round.
    pub(crate) async fn start_faults(&mut self, round: &Round) -> Result<()> {
        for event in &round.faults {
            self.start_fault(*event).await.with_context(|| format!("start {event:?}"))?;
        }
        Ok(())
    }

    /// Ends the faults of a round: Postgres first, then connections, then processes.
    pub(crate) async fn end_faults(&mut self, round: &Round) -> Result<()> {
        let mut events = round.faults.clone();
        events.sort_by_key(|event| match event.fault {
            Fault::StopPostgres | Fault::CrashPostgres => 0,
            Fault::KillWorker | Fault::KillApi | Fault::Drain | Fault::RollingRestart => 2,
            _ => 1,
        });
        for event in events {
            self.end_fault(event).await.with_context(|| format!("end {event:?}"))?;
        }
        Ok(())
    }

    async fn start_fault(&mut self, FaultEvent { fault, target }: FaultEvent) -> Result<()> {
        match fault {
            Fault::KillWorker => kill(&mut self.cluster.workers[target].process).await,
            Fault::KillApi => kill(&mut self.cluster.apis[target].process).await,
            Fault::PauseWorker => self.pause(target).await,
            Fault::StopPostgres => {
                if let Some(server) = self.server.take() {
                    server.stop().await?;
                }
                Ok(())
            }
            Fault::CrashPostgres => {
                // Dropping it is an immediate shutdown.
                drop(self.server.take());
                Ok(())
            }
            Fault::Cut => {
                self.proxies[target].cut();
                Ok(())
            }
            Fault::Partition => {
                self.proxies[target].set(ProxyMode::Closed);
                Ok(())
            }
            Fault::Stall => {
                self.proxies[target].set(ProxyMode::Stalled);
                Ok(())
            }
            Fault::FullDisk => self.disk.fill(),
            Fault::Drain => self.drain(target).await,
            Fault::RollingRestart => Ok(()),
        }
    }

    async fn end_fault(&mut self, FaultEvent { fault, target }: FaultEvent) -> Result<()> {
        match fault {
            Fault::KillWorker => self.start_if_exited(target).await,
            Fault::KillApi => {
                if self.cluster.apis[target].process.has_ended()? {
                    self.cluster.restart_api(target).await?;
                }
                Ok(())
            }
            Fault::PauseWorker => {
                let process = &mut self.cluster.workers[target].process;
                if !process.has_ended()? {
                    process.signal(Signal::CONT)?;
                }
                Ok(())
            }
            Fault::StopPostgres | Fault::CrashPostgres => {
                if self.server.is_none() {
                    self.server = Some(LocalPostgres::start(&self.scratch.join("postgres")).await?);
                }
                Ok(())
            }
            Fault::Cut => Ok(()),
            Fault::Partition | Fault::Stall => {
                self.proxies[target].set(ProxyMode::Open);
                Ok(())
            }
            Fault::FullDisk => self.disk.free(),
            Fault::Drain => self.restart(target).await,
            Fault::RollingRestart => {
                for worker in 0..WORKERS {
                    self.restart(worker).await?;
                }
                Ok(())
            }
        }
    }

    async fn pause(&mut self, target: usize) -> Result<()> {
        let worker = &mut self.cluster.workers[target];
        if worker.process.has_ended()? {
            return Ok(());
        }
        worker.process.signal(Signal::STOP)?;
        // The paused worker cannot change its row, so this is its current incarnation.
        if self.server.is_some() {
            let mut connection = self.cluster.database.connection().await?;
            let query = "SELECT incarnation FROM workers WHERE id = $1";
            self.paused.insert(sqlx::query_scalar(query).bind(&worker.id).fetch_one(&mut connection).await?);
            connection.close().await?;
        }
        Ok(())
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
        let process = &mut self.cluster.workers[target].process;
        if !process.has_ended()? {
            let status = process.terminate().await?;
            ensure!(status.success(), "{status}:\n{}", process.read_log());
        }
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

    pub(crate) async fn stop_processes(&mut self) -> Result<()> {
        self.cluster.stop_processes().await
    }

    /// Removes everything else after the processes were stopped.
    pub(crate) async fn end(mut self) -> Result<()> {
        // Unmount first: ending the cluster removes its directory.
        self.disk.unmount()?;
        self.cluster.end().await?;
        self.server.take().context("Postgres is not running")?.stop().await?;
        Ok(())
    }
}

fn cluster_options() -> ClusterOptions {
    let settings = vec![
        ("CODELIA_WORKER_DRAIN_GRACE_SECONDS", "10".to_owned()),
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", std::env::var(ENGINE_SOCKET).unwrap_or_default()),
    ];
    ClusterOptions { apis: 0, workers: 0, slots: 6, shared_root: true, settings }
}

/// The URL of the database via the proxy. A setting of its connections identifies the process.
fn database_url(cluster: &Cluster, name: &str, proxy: &Proxy) -> String {
    let (port, database) = (proxy.port(), cluster.database.name());
    format!("postgres://codelia@127.0.0.1:{port}/{database}?options=-c%20chaos.process%3D{name}")
}

async fn callers(cluster: &Cluster) -> Result<(Callers, Client)> {
    let quotas = Quotas { concurrent_runs: 100_000, queued_runs: 100_000, ..Quotas::default() };
    let first = cluster.tenant_with("chaos", quotas).await?;
    let mut clients = vec![first.clone()];
    for api in 1..APIS {
        clients.push(Client::connect(&cluster.endpoint(api), &first.secret).await?);
    }
    let secret = cluster.key("chaos", &Scope::ALL).await?;
    Ok((Callers::new(clients), first.with_secret(&secret)?))
}

async fn kill(process: &mut Process) -> Result<()> {
    if !process.has_ended()? {
        process.signal(Signal::KILL)?;
        process.exited().await?;
    }
    Ok(())
}
