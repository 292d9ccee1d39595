//! Ten thousand sessions that nobody uses, on one worker: what they cost it, and what a restart with them does.

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
const AT_ONCE: usize = 32;
/// The promise, for each of them.
const MOST_BYTES: u64 = 1 << 20;
/// How long statements are counted, and how long the database may take to count those before.
const WATCHED: Duration = Duration::from_secs(10);
const COUNTED_AFTER: Duration = Duration::from_secs(15);

const TRANSACTIONS: &str = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";

/// Makes them, looks at the worker, kills it, and waits until a new one serves one of them again.
pub(crate) async fn measure(server: &LocalPostgres) -> Result<String> {
    let mut cluster = Cluster::start_on(Database::on(server).await?, ClusterOptions::default()).await?;
    let quotas = Quotas { sessions: i64::MAX, requests_per_second: 1_000_000, ..Quotas::default() };
    let client = cluster.tenant_with("idle", quotas).await?;
    let (memory_before, statements_before) = (resident(&cluster)?, statements(&cluster).await?);

    let begun = Instant::now();
    let sessions = make_sessions(&client).await?;
    let made_in = begun.elapsed();
    let held: i64 = cluster.store.worker_list(None, 10).await?.iter().map(|worker| worker.sessions).sum();
    ensure!(held == i64::try_from(SESSIONS)?, "only {held} are held");
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
        "{SESSIONS} idle sessions on one worker: made in {made_in:.1?}\n\
         {} worker memory for each: {each} bytes (aim ≤ {MOST_BYTES}); {memory_before} bytes before, {memory_after} after\n       \
         statements each second of the whole installation: {statements_before:.1} with none, {statements_after:.1} with all\n       \
         killed and restarted: ready after {ready_in:.1?}, a run in an old session done after {served_in:.1?}\n",
        if each <= MOST_BYTES { "held  " } else { "MISSED" },
    );
    cluster.end().await?;
    Ok(report)
}

async fn make_sessions(client: &Client) -> Result<Vec<String>> {
    let names = stream::iter(0..SESSIONS).map(|_| async { Ok(client.session().await?.name) });
    names.buffered(AT_ONCE).try_collect().await
}

/// Resident memory of the worker, in bytes.
fn resident(cluster: &Cluster) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", cluster.workers[0].process.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
    Ok(line.context("VmRSS")?.trim().parse::<u64>()? * 1024)
}

/// Transactions of the installation's database in a second, with nobody calling.
async fn statements(cluster: &Cluster) -> Result<f64> {
    tokio::time::sleep(COUNTED_AFTER).await;
    let before = cluster.database.number(TRANSACTIONS).await?;
    tokio::time::sleep(WATCHED).await;
    let done = cluster.database.number(TRANSACTIONS).await? - before;
    #[expect(clippy::cast_precision_loss, reason = "nobody counts that far")]
    Ok(done as f64 / WATCHED.as_secs_f64())
}
