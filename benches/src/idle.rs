//! Cost of 10,000 idle sessions on one worker: memory, statements, restart time.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_store::{LocalPostgres, Quotas};
use codelia_tests::{Client, Cluster, ClusterOptions, Database, eventually};
use futures::{StreamExt, TryStreamExt, stream};
use rustix::process::Signal;

const SESSIONS: usize = 10_000;
const CONCURRENT: usize = 32;
/// The promised limit of worker memory per idle session.
const MAX_BYTES: u64 = 1 << 20;
/// How long statements are counted.
const COUNT_WINDOW: Duration = Duration::from_secs(10);
/// Delay until the database has counted earlier statements.
const STATISTICS_DELAY: Duration = Duration::from_secs(15);

const TRANSACTIONS: &str = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";

/// Creates the sessions, measures the worker, kills it, and waits until its successor serves one.
pub(crate) async fn measure(server: &LocalPostgres) -> Result<String> {
    let mut cluster = Cluster::start_on(Database::on(server).await?, ClusterOptions::default()).await?;
    let quotas = Quotas { sessions: i64::MAX, requests_per_second: 1_000_000, ..Quotas::default() };
    let client = cluster.tenant_with("idle", quotas).await?;
    let (memory_before, statements_before) = (resident(&cluster)?, statements(&cluster).await?);

    let begun = Instant::now();
    let sessions = create_sessions(&client).await?;
    let created_in = begun.elapsed();
    let held: i64 = cluster.store.worker_list(None, 10).await?.iter().map(|worker| worker.sessions).sum();
    ensure!(held == i64::try_from(SESSIONS)?, "the worker holds only {held} sessions");
    let (memory_after, statements_after) = (resident(&cluster)?, statements(&cluster).await?);
    let each = memory_after.saturating_sub(memory_before) / SESSIONS as u64;

    let begun = Instant::now();
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await?;
    let ready_in = begun.elapsed();
    let session = &sessions[0];
    eventually("a run in an old session", || async { client.exec(session, "true").await.ok() }).await;
    let served_in = begun.elapsed();
    let report = format!(
        "{SESSIONS} idle sessions on one worker: created in {created_in:.1?}\n\
         {} worker memory per session: {each} bytes (target ≤ {MAX_BYTES}); {memory_before} bytes before, {memory_after} after\n       \
         statements per second: {statements_before:.1} without sessions, {statements_after:.1} with all\n       \
         after kill and restart: worker ready in {ready_in:.1?}, run in an old session done in {served_in:.1?}\n",
        if each <= MAX_BYTES { "met   " } else { "MISSED" },
    );
    cluster.end().await?;
    Ok(report)
}

async fn create_sessions(client: &Client) -> Result<Vec<String>> {
    let names = stream::iter(0..SESSIONS).map(|_| async { Ok(client.session().await?.name) });
    names.buffered(CONCURRENT).try_collect().await
}

/// Returns the resident memory of the worker in bytes.
fn resident(cluster: &Cluster) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", cluster.workers[0].process.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
    Ok(line.context("VmRSS")?.trim().parse::<u64>()? * 1024)
}

/// Returns the transactions per second of the database, without callers.
async fn statements(cluster: &Cluster) -> Result<f64> {
    tokio::time::sleep(STATISTICS_DELAY).await;
    let before = cluster.database.number(TRANSACTIONS).await?;
    tokio::time::sleep(COUNT_WINDOW).await;
    let done = cluster.database.number(TRANSACTIONS).await? - before;
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    Ok(done as f64 / COUNT_WINDOW.as_secs_f64())
}
