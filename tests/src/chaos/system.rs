//! The installation that faults happen to: processes, each with a way of its own to one Postgres.

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
    plan::{APIS, Fault, Round, SMALL, Strike, WORKERS},
};
use crate::{Client, Cluster, ClusterOptions, Database, ENGINE_SOCKET, Process, Proxy, ProxyMode, Scratch};

/// Notes every end of a run: who brought it about, and whether they had the right to.
const OBSERVER: &str = "
CREATE TABLE chaos_endings (run_id uuid NOT NULL, by_worker boolean NOT NULL, lawful boolean NOT NULL);
CREATE FUNCTION chaos_observe() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_endings VALUES (NEW.id, NEW.receipt IS NOT NULL,
        NEW.receipt IS NULL OR (session_user::text = OLD.worker_id AND EXISTS (
            SELECT 1 FROM sessions s JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
            WHERE s.id = OLD.session_id AND s.lease_worker = OLD.worker_id AND s.lease_incarnation = OLD.incarnation
              AND s.lease_epoch = OLD.lease_epoch AND w.lease_until > now())));
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_observer AFTER UPDATE ON runs FOR EACH ROW WHEN (NEW.state = 'ended') EXECUTE FUNCTION chaos_observe();
";

pub(crate) struct TestSystem {
    /// Goes first: it is in the cluster's directory.
    disk: Disk,
    pub(crate) cluster: Cluster,
    pub(crate) callers: Callers,
    operator: Client,
    server: Option<LocalPostgres>,
    /// The workers' first, then the apis'.
    pub(crate) proxies: Vec<Proxy>,
    /// Lives of workers that were stopped for a while.
    pub(crate) paused: BTreeSet<Uuid>,
    /// Every worker process there was.
    pub(crate) pids: BTreeSet<u32>,
    scratch: Scratch,
}

impl TestSystem {
    pub(crate) async fn start(disabled: DisabledSafeguard) -> Result<Self> {
        let scratch = Scratch::new()?;
        let server = LocalPostgres::start(&scratch.join("postgres")).await?;
        let database = Database::on(&server).await?;
        let mut cluster = Cluster::start_on(database, shape()).await?;
        cluster.database.execute(OBSERVER).await?;
        if let Some(statements) = disabled.statements() {
            cluster.database.execute(statements).await?;
        }
        let disk = Disk::mount(&cluster.directory().join("small"))?;
        let mut proxies = Vec::new();
        for number in 0..WORKERS {
            let proxy = Proxy::start(&scratch.join("postgres"), disabled.replacements())?;
            let url = role(&cluster, &format!("worker-{number}"), &proxy).await?;
            let root = cluster.directory().join("small/root").display().to_string();
            let mut settings = vec![("CODELIA_DATABASE_URL", url.as_str())];
            settings.extend((number == SMALL).then_some(("CODELIA_SANDBOX_ROOT", root.as_str())));
            settings.extend(disabled.settings());
            cluster.add_worker_with(&settings).await?;
            proxies.push(proxy);
        }
        for number in 0..APIS {
            let proxy = Proxy::start(&scratch.join("postgres"), &[])?;
            let url = role(&cluster, &format!("api-{number}"), &proxy).await?;
            cluster.add_api_with(&[("CODELIA_DATABASE_URL", &url)]).await?;
            proxies.push(proxy);
        }
        let (callers, operator) = callers(&cluster).await?;
        let pids = cluster.workers.iter().map(|worker| worker.process.pid()).collect();
        let paused = BTreeSet::new();
        Ok(Self { cluster, callers, operator, server: Some(server), proxies, disk, paused, pids, scratch })
    }

    /// Lets a round's faults begin.
    pub(crate) async fn strike(&mut self, round: &Round) -> Result<()> {
        for strike in &round.strikes {
            self.begin(*strike).await.with_context(|| format!("{strike:?}"))?;
        }
        Ok(())
    }

    /// Ends a round's faults: first what others need, then those who need it.
    pub(crate) async fn heal(&mut self, round: &Round) -> Result<()> {
        let mut strikes = round.strikes.clone();
        strikes.sort_by_key(|strike| match strike.fault {
            Fault::StopPostgres | Fault::CrashPostgres => 0,
            Fault::KillWorker | Fault::KillApi | Fault::Drain | Fault::RollingRestart => 2,
            _ => 1,
        });
        for strike in strikes {
            self.end_strike(strike).await.with_context(|| format!("the end of {strike:?}"))?;
        }
        Ok(())
    }

    async fn begin(&mut self, Strike { fault, target }: Strike) -> Result<()> {
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
                // Dropped, it is stopped at once.
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

    async fn end_strike(&mut self, Strike { fault, target }: Strike) -> Result<()> {
        match fault {
            Fault::KillWorker => self.revive(target).await,
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
        // It is told apart by its row, which it cannot change now.
        if self.server.is_some() {
            let mut connection = self.cluster.database.connection().await?;
            let life = "SELECT incarnation FROM workers WHERE id = $1";
            self.paused.insert(sqlx::query_scalar(life).bind(&worker.id).fetch_one(&mut connection).await?);
            connection.close().await?;
        }
        Ok(())
    }

    /// An operator's word; without a database or an api it cannot be said.
    async fn drain(&mut self, target: usize) -> Result<()> {
        let name = format!("workers/{}", self.cluster.workers[target].id);
        if let Err(status) = self.operator.admin().drain_worker(DrainWorkerRequest { name }).await {
            eprintln!("not drained: {}", status.message());
        }
        Ok(())
    }

    /// Ends a worker in good order and starts it again.
    async fn restart(&mut self, target: usize) -> Result<()> {
        let process = &mut self.cluster.workers[target].process;
        if !process.has_ended()? {
            let status = process.terminate().await?;
            ensure!(status.success(), "{status}:\n{}", process.read_log());
        }
        self.revive(target).await
    }

    async fn revive(&mut self, target: usize) -> Result<()> {
        if self.cluster.workers[target].process.has_ended()? {
            self.cluster.restart_worker(target).await?;
            self.pids.insert(self.cluster.workers[target].process.pid());
        }
        Ok(())
    }

    /// The directories that workers keep sessions in.
    pub(crate) fn roots(&self) -> BTreeSet<PathBuf> {
        self.cluster.workers.iter().map(|worker| worker.root.clone()).collect()
    }

    pub(crate) async fn stop_processes(&mut self) -> Result<()> {
        self.cluster.stop_processes().await
    }

    /// Ends everything in good order, once the processes are stopped.
    pub(crate) async fn end(mut self) -> Result<()> {
        // Stopped before: the disk is in their directory, which goes with them.
        self.disk.unmount()?;
        self.cluster.end().await?;
        self.server.take().context("a server")?.stop().await?;
        Ok(())
    }
}

fn shape() -> ClusterOptions {
    let settings = vec![
        ("CODELIA_WORKER_DRAIN_GRACE_SECONDS", "10".to_owned()),
        ("CODELIA_SANDBOX_CONTAINER_SOCKET", std::env::var(ENGINE_SOCKET).unwrap_or_default()),
    ];
    ClusterOptions { apis: 0, workers: 0, slots: 6, shared_root: true, settings }
}

/// Makes a role by which the database knows the process, and tells its address on its own way.
async fn role(cluster: &Cluster, name: &str, proxy: &Proxy) -> Result<String> {
    cluster.database.execute(&format!("CREATE ROLE \"{name}\" LOGIN SUPERUSER")).await?;
    Ok(format!("postgres://{name}@127.0.0.1:{}/{}", proxy.port(), cluster.database.name()))
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
