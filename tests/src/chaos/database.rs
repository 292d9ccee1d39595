//! The database of the installation under test and its faults.

use anyhow::{Context, Result, ensure};
use sqlx::{AssertSqlSafe, Connection, postgres::PgConnectOptions};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::{
    POLL_INTERVAL,
    clock::Clock,
    disk::{DATABASE_DISK, Disk},
    plan::Fault,
    server::Server,
};
use crate::{Database, PgBouncer, Proxy, ProxyMode, ProxyTarget, Scratch, pgbouncer::Alias};

/// How far the clock jumps, in seconds: much longer than a lease, shorter than the life of a
/// session.
const JUMP: i64 = 600;

/// The setting of each connection that names the process that uses it.
const PROCESS_SETTING: &str = "chaos.process";

/// A Postgres server, with what the faults of a plan need.
#[derive(Debug)]
pub(crate) struct TestDatabase {
    server: Server,
    standby: Option<Standby>,
    clock: Option<Clock>,
    disk: Option<Disk>,
    pooler: Option<PgBouncer>,
    /// From the test itself.
    proxy: Proxy,
    scratch: Scratch,
}

/// A server that follows the first one.
#[derive(Debug)]
struct Standby {
    server: Server,
    /// From the standby to the first server.
    replication: Proxy,
}

impl TestDatabase {
    /// Starts a server with an empty database. A standby, if a fault needs one, is synchronous.
    pub(crate) async fn start(faults: &[Fault]) -> Result<(Self, Database)> {
        Self::start_with(faults, Replication::Synchronous).await
    }

    pub(crate) async fn start_with(
        faults: &[Fault],
        replication: Replication,
    ) -> Result<(Self, Database)> {
        let scratch = Scratch::new()?;
        let directory = scratch.join("postgres");
        let is_small = faults.contains(&Fault::FullDatabaseDisk);
        let disk = is_small.then(|| Disk::mount(&directory, DATABASE_DISK)).transpose()?;
        let mut server = Server::create(&directory)?;
        let jumps =
            faults.iter().any(|fault| matches!(fault, Fault::ClockForward | Fault::ClockBackward));
        let clock =
            jumps.then(|| Clock::install(&mut server, &scratch.join("clock"))).transpose()?;
        server.start().await?;
        let standby = match faults.contains(&Fault::Failover) {
            true => Some(Standby::start(&server, &scratch, replication).await?),
            false => None,
        };
        let name = format!("test_{}", Uuid::new_v4().simple());
        let mut connection = server.connect("postgres").await?;
        let create = AssertSqlSafe(format!("CREATE DATABASE {name}"));
        sqlx::query(create).execute(&mut connection).await?;
        connection.close().await?;
        let proxy = Proxy::to(server.target(), &[])?;
        let options = PgConnectOptions::new_without_pgpass().host("127.0.0.1").port(proxy.port());
        let database = Database::existing(options.username("codelia").database(&name), name);
        Ok((Self { server, standby, clock, disk, pooler: None, proxy, scratch }, database))
    }

    /// Starts PgBouncer, which knows each process by the name of its database. The setting that
    /// tells the checks which process uses a connection would be lost otherwise.
    pub(crate) fn start_pooler(&mut self, database: &str, processes: &[String]) -> Result<()> {
        let alias = |process| Alias {
            name: pooled_name(process),
            database,
            setting: (PROCESS_SETTING, process),
        };
        let aliases: Vec<_> = processes.iter().map(String::as_str).map(alias).collect();
        let directory = self.scratch.join("bouncer");
        self.pooler = Some(PgBouncer::start_with(self.server.target(), &directory, &aliases)?);
        Ok(())
    }

    /// The URL for a process, without its host and port.
    pub(crate) fn name_for(&self, process: &str, database: &str) -> String {
        match &self.pooler {
            Some(_) => pooled_name(process),
            None => format!("{database}?options=-c%20{PROCESS_SETTING}%3D{process}"),
        }
    }

    /// Waits until the standby has everything, and sends it nothing from then on.
    pub(crate) async fn stall_replication(&self) -> Result<()> {
        let standby = self.standby.as_ref().context("no standby")?;
        let mut connection = self.server.connect("postgres").await?;
        let behind = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn < $1::pg_lsn";
        let position: String = sqlx::query_scalar("SELECT pg_current_wal_lsn()::text")
            .fetch_one(&mut connection)
            .await?;
        while sqlx::query_scalar::<_, i64>(behind)
            .bind(&position)
            .fetch_one(&mut connection)
            .await?
            > 0
        {
            sleep(POLL_INTERVAL).await;
        }
        standby.replication.set(ProxyMode::Stalled);
        connection.close().await?;
        Ok(())
    }

    /// The address of the current server, or of PgBouncer in front of it.
    pub(crate) fn target(&self) -> ProxyTarget {
        self.pooler.as_ref().map_or_else(|| self.server.target(), PgBouncer::target)
    }

    pub(crate) fn is_running(&mut self) -> Result<bool> {
        self.server.is_running()
    }

    pub(crate) async fn start_fault(&mut self, fault: Fault, target: usize) -> Result<()> {
        match fault {
            Fault::StopPostgres => self.server.stop().await,
            Fault::CrashPostgres => self.server.crash().await,
            Fault::KillBackend if self.server.is_running()? => {
                self.server.kill_backend(target).await.map(drop)
            }
            Fault::FullDatabaseDisk => self.disk.as_ref().context("no disk")?.fill(),
            Fault::ClockForward => self.clock.as_ref().context("no clock")?.set(JUMP),
            Fault::ClockBackward => self.clock.as_ref().context("no clock")?.set(-JUMP),
            // There is one standby: later failovers of a seed do nothing.
            Fault::Failover if self.standby.is_some() => self.server.kill().await,
            _ => Ok(()),
        }
    }

    pub(crate) async fn end_fault(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::ClockForward | Fault::ClockBackward => {
                self.clock.as_ref().context("no clock")?.set(0)?
            }
            Fault::FullDatabaseDisk => self.disk.as_ref().context("no disk")?.free()?,
            Fault::Failover => {
                if let Some(standby) = self.standby.take() {
                    standby.server.promote().await?;
                    self.server = standby.server;
                    self.proxy.redirect(self.server.target());
                    if let Some(pooler) = &self.pooler {
                        pooler.redirect(self.server.target());
                    }
                }
            }
            _ => {}
        }
        self.server.ensure_running().await
    }

    pub(crate) async fn end(mut self) -> Result<()> {
        if let Some(pooler) = self.pooler.take() {
            pooler.stop().await?;
        }
        self.server.stop().await?;
        if let Some(mut standby) = self.standby.take() {
            standby.server.stop().await?;
        }
        if let Some(mut disk) = self.disk.take() {
            disk.unmount()?;
        }
        drop(self.scratch);
        Ok(())
    }
}

/// The name of the database that PgBouncer offers to a process.
fn pooled_name(process: &str) -> String {
    format!("for_{}", process.replace('-', "_"))
}

/// When a commit is acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replication {
    /// When the standby has it, too.
    Synchronous,
    /// When the first server has it.
    Asynchronous,
}

impl Standby {
    /// Starts a standby of a running server.
    async fn start(primary: &Server, scratch: &Scratch, kind: Replication) -> Result<Self> {
        let replication = Proxy::to(primary.target(), &[])?;
        let mut server = Server::create_standby(&scratch.join("standby"), replication.port())?;
        server.start().await?;
        let mut connection = primary.connect("postgres").await?;
        if kind == Replication::Synchronous {
            for statement in
                ["ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"]
            {
                sqlx::query(statement).execute(&mut connection).await?;
            }
        }
        let expected = if kind == Replication::Synchronous { "sync" } else { "async" };
        let following = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = $1";
        let deadline = Instant::now() + crate::TIMEOUT;
        while sqlx::query_scalar::<_, i64>(following)
            .bind(expected)
            .fetch_one(&mut connection)
            .await?
            == 0
        {
            ensure!(Instant::now() < deadline, "the standby does not follow");
            sleep(POLL_INTERVAL).await;
        }
        connection.close().await?;
        Ok(Self { server, replication })
    }
}
