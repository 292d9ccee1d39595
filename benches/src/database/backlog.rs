//! Runs that were queued while no worker was ready: they drain as fast as a short queue.

use std::time::{Duration, Instant};

use anyhow::Result;
use codelia_proto::{duration_to_proto, v1::StartRunRequest};
use codelia_store::{LocalPostgres, Quotas};
use codelia_tests::{Client, Cluster, ClusterOptions, Database, command};
use futures::{StreamExt, TryStreamExt, stream};

use crate::report::Report;

/// Runs of the long queue,
pub(crate) const RUNS: u64 = 100_000;
/// and of the short one.
const SHORT: usize = 2_000;
/// Runs of each session.
const RUNS_PER_SESSION: usize = 20;
const CONCURRENT: usize = 32;
const QUEUE_TIMEOUT: Duration = Duration::from_secs(7200);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Measures the rate of a short queue, of a long one, and of a short one again.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize, runs: u64) -> Result<Report> {
    let mut report = Report::default();
    let mut rates = Vec::new();
    for runs in [SHORT, usize::try_from(runs)?, SHORT] {
        let rate = drain(server, cores, runs).await?;
        report.note(&format!("{runs:>7} queued runs drained at {rate:.0} runs/s"));
        rates.push(rate);
    }
    let short = f64::midpoint(rates[0], rates[2]);
    report.check_ratio("rate of a long queue relative to a short one", rates[1] / short, 0.8);
    Ok(report)
}

/// Queues the runs without a worker, then starts one and waits until all have ended.
async fn drain(server: &LocalPostgres, cores: usize, runs: usize) -> Result<f64> {
    let settings =
        vec![("CODELIA_LIMITS_MAX_QUEUE_TIMEOUT", format!("{}s", QUEUE_TIMEOUT.as_secs()))];
    let shape = ClusterOptions { slots: 4 * cores, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let quotas = Quotas {
        sessions: 1_000_000,
        concurrent_runs: 1_000_000,
        queued_runs: 1_000_000,
        requests_per_second: 1_000_000,
        ..Quotas::default()
    };
    let client = cluster.tenant_with("backlog", quotas).await?;
    // A worker must have been seen with the mode; none is there when the runs are queued.
    cluster.workers[0].process.signal(rustix::process::Signal::TERM)?;
    cluster.workers[0].process.exited().await?;
    let sessions = stream::iter(0..runs / RUNS_PER_SESSION).map(|_| queue_session(&client));
    sessions.buffer_unordered(CONCURRENT).try_collect::<()>().await?;
    let begin = Instant::now();
    cluster.restart_worker(0).await?;
    while cluster.database.number("SELECT count(*) FROM live_runs").await? > 0 {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let took = begin.elapsed();
    cluster.end().await?;
    #[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
    Ok(runs as f64 / took.as_secs_f64())
}

async fn queue_session(client: &Client) -> Result<()> {
    let session = client.session().await?;
    for _ in 0..RUNS_PER_SESSION {
        let queue_timeout = Some(duration_to_proto(QUEUE_TIMEOUT));
        client
            .start(StartRunRequest { queue_timeout, ..command(&session.name, &["true"]) })
            .await?;
    }
    Ok(())
}
