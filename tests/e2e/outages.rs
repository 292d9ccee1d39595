//! Database outages and paused workers.

use std::time::Duration;

use anyhow::{Context, Result};
use codelia_proto::v1::{
    ListWorkersRequest, Lost, Run, RunState, StartRunRequest, WorkerState,
    outcome::Kind::{self, Exited},
};
use codelia_store::LocalPostgres;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Database, Proxy, ProxyMode, Scratch, WORKER_LEASE_SECONDS,
    eventually, refusal, shell,
};
use rustix::process::Signal;
use tonic::Code;

use crate::service::{free_address, http_get};

/// An installation, a proxy in front of its database, and the URL that leads through the proxy. The
/// server and its directory come last.
async fn with_proxy(
    shape: ClusterOptions,
) -> Result<(Cluster, Proxy, String, LocalPostgres, Scratch)> {
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start(&scratch.join("postgres")).await?;
    let cluster = Cluster::start_on(Database::on(&server).await?, shape).await?;
    let proxy = Proxy::start(&scratch.join("postgres"), &[])?;
    let url = format!("postgres://codelia@127.0.0.1:{}/{}", proxy.port(), cluster.database.name());
    Ok((cluster, proxy, url, server, scratch))
}

/// An installation whose worker reaches the database through a proxy.
struct Outage {
    cluster: Cluster,
    client: Client,
    proxy: Proxy,
    server: LocalPostgres,
    scratch: Scratch,
}

impl Outage {
    async fn new(slots: usize) -> Result<Self> {
        let shape = ClusterOptions { workers: 0, slots, ..ClusterOptions::default() };
        let (mut cluster, proxy, url, server, scratch) = with_proxy(shape).await?;
        cluster.add_worker_with(&[("CODELIA_DATABASE_URL", &url)]).await?;
        let client = cluster.tenant("a").await?;
        Ok(Self { cluster, client, proxy, server, scratch })
    }

    /// Waits until the worker was fenced and has registered again.
    async fn wait_fenced(&self) {
        let fenced = || async {
            let count = "SELECT count(*) FROM audit WHERE kind = 'WORKER_FENCED'";
            (self.cluster.database.number(count).await.ok()? > 0).then_some(())
        };
        eventually("the worker was fenced", fenced).await;
    }

    async fn end(self) -> Result<()> {
        self.cluster.end().await?;
        self.server.stop().await?;
        drop(self.scratch);
        Ok(())
    }
}

async fn running(client: &Client, run: &Run) {
    eventually("the run is running", || async {
        (client.get_run(&run.name).await.ok()?.state() == RunState::Running).then_some(())
    })
    .await;
}

/// Waits until a command has created the file `begun`.
async fn begun(cluster: &Cluster) {
    eventually("the command has started", || async {
        cluster
            .session_directories()
            .ok()?
            .iter()
            .any(|directory| directory.join("begun").exists())
            .then_some(())
    })
    .await;
}

#[tokio::test]
async fn api_exits_while_database_does_not_answer() -> Result<()> {
    let shape = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let (mut cluster, proxy, url, server, _scratch) = with_proxy(shape).await?;
    cluster.add_api_with(&[("CODELIA_DATABASE_URL", &url)]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    proxy.set(ProxyMode::Stalled);
    let unanswered =
        tokio::time::timeout(Duration::from_secs(1), client.get_session(&session.name)).await;
    assert!(unanswered.is_err(), "the control: {unanswered:?}");
    let api = &mut cluster.apis[0].process;
    assert!(api.terminate().await?.success());
    assert!(api.read_log().contains("connections are dropped"), "{}", api.read_log());
    cluster.end().await?;
    server.stop().await?;
    Ok(())
}

#[tokio::test]
async fn result_is_committed_after_database_outage() -> Result<()> {
    let outage = Outage::new(4).await?;
    let session = outage.client.session().await?;
    let script = "touch begun; until [ -e go ]; do sleep 0.02; done; echo held";
    let run = outage.client.start(shell(&session.name, script)).await?;
    begun(&outage.cluster).await;
    outage.proxy.set(ProxyMode::Closed);
    for directory in outage.cluster.session_directories()? {
        std::fs::write(directory.join("go"), "")?;
    }
    let log = &outage.cluster.workers[0].process;
    eventually("the commit is retried", || async {
        log.read_log()
            .lines()
            .any(|line| line.contains("store unavailable, retrying") && line.contains("commit"))
            .then_some(())
    })
    .await;
    outage.proxy.set(ProxyMode::Open);
    let seen = outage.client.watch_to_end(&run.name, 0).await?;
    assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("held\n", Exited(0)));
    outage.end().await
}

#[tokio::test]
async fn run_stuck_in_outage_restarts_with_next_incarnation() -> Result<()> {
    let outage = Outage::new(1).await?;
    let session = outage.client.session().await?;
    let first = outage.client.start(shell(&session.name, "touch begun; exec sleep 1000")).await?;
    begun(&outage.cluster).await;
    outage.proxy.set(ProxyMode::Closed);
    // The run is recorded and pushed, finds no slot, and cannot be handed back.
    let second = StartRunRequest { retries: 1, ..shell(&session.name, "echo again") };
    let second = outage.client.start(second).await?;
    running(&outage.client, &second).await;
    eventually("the run cannot be handed back", || async {
        let log = outage.cluster.workers[0].process.read_log();
        log.contains("cannot hand back run").then_some(())
    })
    .await;
    // By then the old incarnation has given up its retries.
    eventually("the lease is lost and registration fails", || async {
        let log = outage.cluster.workers[0].process.read_log();
        (log.matches("registration failed").count() > 3).then_some(())
    })
    .await;
    outage.proxy.set(ProxyMode::Open);
    outage.wait_fenced().await;
    let seen = outage.client.watch_to_end(&second.name, 0).await?;
    assert_eq!((seen.stdout_text().as_str(), seen.run().attempt), ("again\n", 2));
    let first = outage.client.get_run(&first.name).await?;
    assert_eq!(
        first.outcome.context("an outcome")?.kind,
        Some(Kind::Lost(Lost { reason: "worker_lost".into() }))
    );
    outage.end().await
}

#[tokio::test]
async fn result_refused_by_database_ends_as_lost() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                  BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'check_violation'; END $$;
                  CREATE TRIGGER refused BEFORE INSERT ON ended_runs
                  FOR EACH ROW WHEN (NEW.result #> '{outcome,detail}' = '7') EXECUTE FUNCTION refuse()";
    cluster.database.execute(refuse).await?;
    let run = client.start(shell(&session.name, "exit 7")).await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Kind::Lost(Lost { reason: "result_rejected".into() }));
    assert_eq!(
        client.exec(&session.name, "exit 6").await?.outcome(),
        Exited(6),
        "the worker still works"
    );
    cluster.end().await
}

#[tokio::test]
async fn database_outage_returns_unavailable_with_retry_delay() -> Result<()> {
    let mut outage = Outage::new(4).await?;
    let session = outage.client.session().await?;
    outage.server.stop().await?;
    let refused = outage.client.start(shell(&session.name, "true")).await.expect_err("no database");
    let refusal = refusal(&refused);
    assert_eq!((refusal.code, refusal.reason.as_str()), (Code::Unavailable, "UNAVAILABLE"));
    assert!(refusal.retry_after.is_some_and(|delay| delay > Duration::ZERO), "{refusal:?}");
    outage.server = LocalPostgres::start(&outage.scratch.join("postgres")).await?;
    let seen = eventually("the service is back", || async {
        outage.client.exec(&session.name, "echo back").await.ok()
    })
    .await;
    assert_eq!(seen.stdout_text(), "back\n");
    outage.end().await
}

#[tokio::test]
async fn worker_paused_past_lease_commits_nothing() -> Result<()> {
    let shape =
        ClusterOptions { workers: 2, shared_root: true, slots: 2, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    // The command ends while its worker is paused, so that a result waits for the worker.
    let script = "touch begun; until [ -e go ]; do sleep 0.02; done; echo stale";
    let run = client.start(shell(&session.name, script)).await?;
    begun(&cluster).await;
    let paused = client.get_run(&run.name).await?.worker_id;
    cluster.worker(&paused).process.signal(Signal::STOP)?;
    for directory in cluster.session_directories()? {
        std::fs::write(directory.join("go"), "")?;
    }
    let next = eventually("the session runs elsewhere", || async {
        let run = client.start(shell(&session.name, "echo fresh")).await.ok()?;
        (client.watch_to_end(&run.name, 0).await.ok()?.run().worker_id != paused).then_some(())
    });
    next.await;
    cluster.worker(&paused).process.signal(Signal::CONT)?;
    let operator = cluster.operator().await?;
    eventually("the worker is fenced", || async {
        let fenced = "SELECT count(*) FROM audit WHERE kind = 'WORKER_FENCED'";
        (cluster.database.number(fenced).await.ok()? > 0).then_some(())
    })
    .await;
    let found = client.get_run(&run.name).await?;
    assert_eq!(
        found.outcome.context("an outcome")?.kind,
        Some(Kind::Lost(Lost { reason: "worker_lost".into() }))
    );
    assert_eq!(found.output_bytes, 0, "no output was stored");
    let session = client.get_session(&session.name).await?;
    assert_ne!(session.worker_id, paused);
    let workers =
        operator.admin().list_workers(ListWorkersRequest::default()).await?.into_inner().workers;
    let found = workers.iter().find(|worker| worker.worker_id == paused).context("the worker")?;
    assert_eq!(found.state(), WorkerState::Ready, "it serves again after {WORKER_LEASE_SECONDS} s");
    client.close(&session.name).await?;
    eventually("no session directory is left", || async {
        cluster.session_directories().ok()?.is_empty().then_some(())
    })
    .await;
    cluster.end().await
}

/// Counts the lines that commands have written to `beats`.
fn beats(cluster: &Cluster) -> usize {
    let directories = cluster.session_directories().unwrap_or_default();
    let texts =
        directories.iter().filter_map(|dir| std::fs::read_to_string(dir.join("beats")).ok());
    texts.map(|text| text.lines().count()).sum()
}

#[tokio::test]
async fn commands_of_paused_worker_die_before_session_moves() -> Result<()> {
    let shape =
        ClusterOptions { workers: 2, shared_root: true, slots: 2, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run =
        client.start(shell(&session.name, "while :; do echo >> beats; sleep 0.05; done")).await?;
    eventually("the control: the command keeps writing", || async {
        (beats(&cluster) > 20).then_some(())
    })
    .await;
    let paused = client.get_run(&run.name).await?.worker_id;
    cluster.worker(&paused).process.signal(Signal::STOP)?;
    let next = eventually("the session runs elsewhere", || async {
        let count = "wc -l < beats; sleep 0.5; wc -l < beats";
        let run = client.start(shell(&session.name, count)).await.ok()?;
        let seen = client.watch_to_end(&run.name, 0).await.ok()?;
        (seen.run().worker_id != paused).then(|| seen.stdout_text())
    });
    let next = next.await;
    let counts: Vec<&str> = next.lines().collect();
    assert!(
        counts.len() == 2 && counts[0] == counts[1],
        "the old command still runs next to the new one: {counts:?}"
    );
    cluster.worker(&paused).process.signal(Signal::CONT)?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Kind::Lost(Lost { reason: "worker_lost".into() }));
    cluster.end().await
}

#[tokio::test]
async fn database_outage_makes_worker_unready_but_live() -> Result<()> {
    let shape = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let (mut cluster, proxy, url, server, scratch) = with_proxy(shape).await?;
    let probes = free_address().await?;
    let settings =
        [("CODELIA_DATABASE_URL", url.as_str()), ("CODELIA_METRICS_LISTEN", probes.as_str())];
    cluster.add_worker_with(&settings).await?;
    let status = async |path: &str| http_get(&probes, path).await.map(|(status, _)| status);
    assert_eq!((status("/startupz").await?, status("/readyz").await?), (200, 200));

    proxy.set(ProxyMode::Closed);
    let is_unready = || async { (status("/readyz").await.ok()? == 503).then_some(()) };
    eventually("the worker is not ready", is_unready).await;
    // The keeper tries to register again and again, for longer than a stuck one would be tolerated.
    let until = tokio::time::Instant::now() + Duration::from_secs(4 * WORKER_LEASE_SECONDS);
    while tokio::time::Instant::now() < until {
        assert_eq!(status("/healthz").await?, 200, "nothing is gained by a restart");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!((status("/startupz").await?, status("/readyz").await?), (200, 503));
    proxy.set(ProxyMode::Open);
    let is_ready = || async { (status("/readyz").await.ok()? == 200).then_some(()) };
    eventually("the worker is ready again", is_ready).await;
    cluster.end().await?;
    server.stop().await?;
    drop(scratch);
    Ok(())
}

#[tokio::test]
async fn run_lost_at_takeover_is_counted() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let metrics = free_address().await?;
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &metrics)]).await?;
    // Nobody sweeps: only the next holder of the session can end the run.
    let stranger =
        "UPDATE upkeep_owner SET holder = gen_random_uuid(), until = now() + interval '1 hour'";
    cluster.database.execute(stranger).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, "touch begun; exec sleep 1000")).await?;
    begun(&cluster).await;
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await?;
    let counted =
        |count: u32| format!("codelia_runs_lost_total{{reason=\"worker_lost\"}} {count}\n");
    assert!(http_get(&metrics, "/metrics").await?.1.contains(&counted(0)), "the control");
    client.exec(&session.name, "true").await?;
    let lost = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(lost.outcome(), Kind::Lost(Lost { reason: "worker_lost".into() }));
    // It is counted after it is stored.
    eventually("the lost run is counted", || async {
        http_get(&metrics, "/metrics").await.ok()?.1.contains(&counted(1)).then_some(())
    })
    .await;
    cluster.end().await
}
