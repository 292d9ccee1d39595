//! Cost of 10,000 idle sessions on one worker, with a million ended runs: memory, processor time,
//! statements, restart time.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_store::{LocalPostgres, Quotas};
use codelia_tests::{Client, Cluster, ClusterOptions, Database, eventually};
use codelia_types::Mode;
use futures::{StreamExt, TryStreamExt, stream};
use rustix::process::Signal;

use crate::{
    database::{fill, statement_counts::CountStart},
    modes,
    processor_time::{ProcessorTime, Stolen},
    report::Report,
    runs::create_session,
};

const SESSIONS: usize = 10_000;
const CONCURRENT: usize = 32;
/// The promised limit of worker memory per idle session.
const MAX_BYTES: u64 = 1 << 20;
/// How long statements and processor time are counted.
const COUNT_WINDOW: Duration = Duration::from_secs(30);
/// Ended runs in the database.
const RUNS: u64 = 1_000_000;
/// The share of a core that an idle process may use.
const MAX_SHARE: f64 = 0.01;
/// The default of `worker.poll_interval`; the workers of tests poll more often.
const POLL_INTERVAL: &str = "500ms";
/// Delay until earlier work of the database is done.
const SETTLE_DELAY: Duration = Duration::from_secs(15);

/// Fills the history, creates the sessions, measures the processes, kills the worker, and waits
/// until its successor serves a session.
pub(crate) async fn measure(server: &LocalPostgres) -> Result<Report> {
    let mut cluster = Cluster::start_on(
        Database::on(server).await?,
        ClusterOptions { workers: 0, ..Default::default() },
    )
    .await?;
    cluster.add_worker_with(&[("CODELIA_WORKER_POLL_INTERVAL", POLL_INTERVAL)]).await?;
    let quotas = Quotas { sessions: i64::MAX, requests_per_second: 1_000_000, ..Quotas::default() };
    let client = cluster.tenant_with("load", quotas).await?;
    let template = client.session().await?;
    client.exec(&template.name, "true").await?;
    fill::ended_runs(&cluster.database, template.session_id.parse()?, RUNS).await?;
    let mut report = Report::default();
    let mode = modes::served(&cluster, &modes::ALL, &mut report).await?;
    let mode = *mode.last().context("no mode is served")?;
    report.note(&format!("mode {}", mode.as_str()));
    let memory_before = resident(&cluster)?;
    note_idle(&mut report, &cluster, "no sessions").await?;

    let begun = Instant::now();
    let sessions = create_sessions(&client, mode).await?;
    report.note(&format!("{SESSIONS} sessions created in {:.1?}", begun.elapsed()));
    let in_worker: i64 =
        cluster.store.worker_list(None, 10).await?.iter().map(|worker| worker.sessions).sum();
    ensure!(in_worker > i64::try_from(SESSIONS)?, "the worker holds only {in_worker} sessions");
    let each = resident(&cluster)?.saturating_sub(memory_before) / SESSIONS as u64;
    report.check(
        each <= MAX_BYTES,
        &format!("worker memory per session: {each} bytes (target ≤ {MAX_BYTES})"),
    );
    note_idle(&mut report, &cluster, "all sessions").await?;

    let begun = Instant::now();
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await?;
    let ready_in = begun.elapsed();
    let session = &sessions[0];
    eventually("a run in an old session", || async { client.exec(session, "true").await.ok() })
        .await;
    report.note(&format!(
        "after kill and restart: worker ready in {ready_in:.1?}, run in an old session done in {:.1?}",
        begun.elapsed()
    ));
    cluster.end().await?;
    Ok(report)
}

async fn create_sessions(client: &Client, mode: Mode) -> Result<Vec<String>> {
    let names = stream::iter(0..SESSIONS).map(|_| create_session(client, mode));
    names.buffered(CONCURRENT).try_collect().await
}

/// Returns the resident memory of the worker in bytes.
fn resident(cluster: &Cluster) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", cluster.workers[0].process.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
    Ok(line.context("VmRSS")?.trim().parse::<u64>()? * 1024)
}

/// Measures statements and processor time of the processes without callers.
async fn note_idle(report: &mut Report, cluster: &Cluster, when: &str) -> Result<()> {
    fill::settle(&cluster.database).await?;
    tokio::time::sleep(SETTLE_DELAY).await;
    let counted = CountStart::now(&cluster.database).await?;
    let before = ProcessorTime::read(cluster).await?;
    let stolen_before = Stolen::read()?;
    tokio::time::sleep(COUNT_WINDOW).await;
    let stolen = Stolen::read()?.share_since(&stolen_before);
    let used = ProcessorTime::read(cluster).await?.since(&before);
    report.note(&format!("the database, in a second with {when}:"));
    for line in counted.end(&cluster.database).await?.lines(COUNT_WINDOW.as_secs_f64()) {
        report.note(&line);
    }
    // Time that the machine's host takes counts as the process's own.
    report.note(&format!("the machine's host took {:.0} % of the processor time", stolen * 100.0));
    for process in ["api", "worker", "Postgres"] {
        let share = used[process] / COUNT_WINDOW.as_secs_f64();
        let text = format!("{process}, idle with {when}: {:.2} % of a core", share * 100.0);
        report.check(share < MAX_SHARE, &format!("{text} (target < {:.0} %)", MAX_SHARE * 100.0));
    }
    Ok(())
}
