//! Apis and workers are replaced one after the other under load, in the order of
//! `docs/operations/maintenance.md`: the database is migrated first, then the apis change, then the
//! workers. Nothing is lost.
//!
//! `make skew REV=…` starts with the programs of a release; otherwise both builds are this one.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use codelia_proto::v1::{CreateSessionRequest, Run, StartRunRequest, outcome::Kind};
use codelia_tests::{Client, Cluster, ClusterOptions, Program, eventually, shell};
use futures::future::try_join_all;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};

use crate::service::{free_address, http_get};

/// Sessions that run commands at the same time.
const CALLERS: usize = 6;
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a call is retried, and how long a run may take.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// A caller with both apis. Repeats a call at the other one if an api does not answer.
struct Caller<'a> {
    clients: &'a [Client; 2],
    number: usize,
}

impl Caller<'_> {
    async fn call<T>(&self, call: impl AsyncFn(Client) -> Result<T, Status>) -> Result<T> {
        let deadline = Instant::now() + RETRY_TIMEOUT;
        for attempt in self.number.. {
            match timeout(CALL_TIMEOUT, call(self.clients[attempt % 2].clone())).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) if !is_retryable(&status) => return Err(status.into()),
                last if Instant::now() > deadline => bail!("no api answered: {:?}", last.err()),
                _ => sleep(Duration::from_millis(50)).await,
            }
        }
        bail!("no attempt is left")
    }

    /// Runs a script once: it may not be executed again.
    async fn run(&self, session: &str, script: &str) -> Result<Run> {
        let idempotency_key = uuid::Uuid::new_v4().to_string();
        let request = StartRunRequest { idempotency_key, ..shell(session, script) };
        let run = self.call(async |client| client.start(request.clone()).await).await?.name;
        let deadline = Instant::now() + RETRY_TIMEOUT;
        loop {
            let found = self.call(async |client| client.get_run(&run).await).await?;
            if found.outcome.is_some() {
                return Ok(found);
            }
            ensure!(Instant::now() < deadline, "the run does not end: {found:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Runs commands in one session until `stop`. Each sees the files of all before it.
    async fn use_session(&self, runs: &AtomicUsize, stop: &AtomicBool) -> Result<usize> {
        let idempotency_key = uuid::Uuid::new_v4().to_string();
        let request = CreateSessionRequest { idempotency_key, ..CreateSessionRequest::default() };
        let session = self.call(async |client| client.create(request.clone()).await).await?.name;
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            count += 1;
            let script = format!("echo line >> log; sleep 0.1; test $(wc -l < log) = {count}");
            let run = self.run(&session, &script).await?;
            let outcome = run.outcome.as_ref().and_then(|outcome| outcome.kind.clone());
            ensure!(outcome == Some(Kind::Exited(0)) && run.attempt == 1, "run {count}: {run:?}");
            runs.fetch_add(1, Ordering::Relaxed);
        }
        Ok(count)
    }
}

/// What an ordinary retry policy of gRPC repeats, and a connection that broke.
fn is_retryable(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
}

/// Lost runs that a process has counted, for all reasons.
async fn counted_losses(address: &str) -> Result<f64> {
    let page = http_get(address, "/metrics").await?.1;
    let lines = page.lines().filter(|line| line.starts_with("codelia_runs_lost_total{"));
    lines.map(|line| Ok(line.rsplit(' ').next().context("a value")?.parse::<f64>()?)).sum()
}

/// Waits until every caller has ended some more runs.
async fn run_more(runs: &AtomicUsize) {
    let target = runs.load(Ordering::Relaxed) + 2 * CALLERS;
    eventually("more runs end", || async {
        (runs.load(Ordering::Relaxed) >= target).then_some(())
    })
    .await;
}

/// Replaces apis, then workers, with this build.
async fn replace_all(
    cluster: &mut Cluster,
    metrics: &[String; 4],
    runs: &AtomicUsize,
) -> Result<()> {
    run_more(runs).await;
    cluster.use_program(Program::find()?);
    for (api, address) in metrics[..2].iter().enumerate() {
        ensure!(counted_losses(address).await? == 0.0, "api {api} counted a loss");
        ensure!(cluster.apis[api].process.terminate().await?.success(), "api {api}");
        cluster.restart_api(api).await?;
        run_more(runs).await;
    }
    for (worker, address) in metrics[2..].iter().enumerate() {
        ensure!(counted_losses(address).await? == 0.0, "worker {worker} counted a loss");
        ensure!(cluster.workers[worker].process.terminate().await?.success(), "worker {worker}");
        cluster.restart_worker(worker).await?;
        run_more(runs).await;
    }
    Ok(())
}

#[tokio::test]
async fn rolling_restart_under_load_loses_nothing() -> Result<()> {
    // A drain waits for every run of this test.
    let settings = vec![("CODELIA_WORKER_DRAIN_GRACE", "60s".to_owned())];
    let shape = ClusterOptions { apis: 0, workers: 0, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    if let Some(previous) = Program::previous() {
        cluster.use_program(previous);
    }
    let metrics = [
        free_address().await?,
        free_address().await?,
        free_address().await?,
        free_address().await?,
    ];
    for address in &metrics[2..] {
        cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", address)]).await?;
    }
    for address in &metrics[..2] {
        cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", address)]).await?;
    }
    let first = cluster.tenant("a").await?;
    let second = Client::connect(&cluster.endpoint(1), &first.secret).await?;
    let clients = [first, second];
    let (runs, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let callers: Vec<_> = (0..CALLERS).map(|number| Caller { clients: &clients, number }).collect();
    let load = try_join_all(callers.iter().map(|caller| caller.use_session(&runs, &stop)));
    let replace = async {
        let replaced = replace_all(&mut cluster, &metrics, &runs).await;
        stop.store(true, Ordering::Relaxed);
        replaced
    };
    let (counts, ()) = tokio::try_join!(load, replace)?;
    for address in &metrics {
        assert_eq!(counted_losses(address).await?, 0.0, "{address}");
    }
    let recorded = cluster.database.number("SELECT count(*) FROM runs").await?;
    assert_eq!(recorded, i64::try_from(counts.iter().sum::<usize>())?);
    let clean = "SELECT count(*) FROM runs WHERE state = 'ended' AND outcome->>'kind' = 'exited' AND attempt = 1";
    assert_eq!(cluster.database.number(clean).await?, recorded);
    cluster.end().await
}
