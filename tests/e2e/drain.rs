//! A worker that shuts down waits for its runs until a deadline, hands back what may be retried,
//! and ends the rest as lost. `codelia workers drain --wait` waits until a worker is empty.

use anyhow::{Context, Result};
use codelia_proto::v1::{
    ListWorkersRequest, Lost, Run, StartRunRequest, WorkerState, outcome::Kind,
};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, eventually, shell};
use rustix::process::Signal;

/// Starts a script that creates `begun` in its session, and waits for that.
async fn begin(cluster: &Cluster, client: &Client, request: StartRunRequest) -> Result<Run> {
    let run = client.start(request).await?;
    eventually("the command has begun", || async {
        let begun = |directory: &std::path::PathBuf| directory.join("begun").exists();
        cluster.session_directories().ok()?.iter().any(begun).then_some(())
    })
    .await;
    Ok(client.get_run(&run.name).await?)
}

#[tokio::test]
async fn run_beyond_drain_deadline_is_lost_with_reason() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "trap 'echo asked; exit 3' TERM; touch begun; sleep 1000 & wait";
    let run = begin(&cluster, &client, shell(&session.name, script)).await?;
    let other = client.session().await?;
    let short = client.start(shell(&other.name, "exit 5")).await?;
    let short = client.watch_to_end(&short.name, 0).await?;
    cluster.workers[0].process.signal(Signal::TERM)?;
    assert!(cluster.workers[0].process.exited().await?.success());
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Kind::Lost(Lost { reason: "drain_deadline".into() }));
    assert_eq!(
        seen.stdout_text(),
        "asked\n",
        "its command was asked to end, and its output is kept"
    );
    assert_eq!(short.outcome(), Kind::Exited(5));
    let session = client.get_session(&session.name).await?;
    assert!(session.worker_id.is_empty(), "the session is handed back: {session:?}");
    let shown = cluster.cli(&client, &["attach", &seen.run().run_id]);
    let shown = Process::finish(shown, b"").await?;
    assert!(shown.code == Some(125) && shown.stderr.contains("worker shut down"), "{shown:?}");
    cluster.end().await
}

#[tokio::test]
async fn retried_run_moves_at_drain_deadline() -> Result<()> {
    let shape = ClusterOptions { workers: 2, shared_root: true, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script =
        "if [ -e begun ]; then echo again; else echo first; touch begun; exec sleep 1000; fi";
    let request = StartRunRequest { retries: 1, ..shell(&session.name, script) };
    let run = begin(&cluster, &client, request).await?;
    cluster.worker(&run.worker_id).process.signal(Signal::TERM)?;
    assert!(cluster.worker(&run.worker_id).process.exited().await?.success());
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!((seen.outcome(), seen.run().attempt), (Kind::Exited(0), 2));
    assert_eq!(seen.stdout_text(), "again\n", "the output of the first attempt is deleted");
    assert_ne!(seen.run().worker_id, run.worker_id);
    cluster.end().await
}

#[tokio::test]
async fn drain_wait_returns_when_worker_is_empty() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let session = operator.session().await?;
    let script = "touch begun; until [ -e go ]; do sleep 0.05; done; exit 4";
    let run = begin(&cluster, &operator, shell(&session.name, script)).await?;

    let impatient = ["workers", "drain", "worker-0", "--wait", "--timeout", "1ms"];
    let done = Process::finish(cluster.cli(&operator, &impatient), b"").await?;
    assert!(done.code == Some(1) && done.stderr.contains("still has 1 sessions"), "{done:?}");

    let wait = cluster.cli(&operator, &["workers", "drain", "worker-0", "--wait", "--json"]);
    let end_run = async {
        eventually("the worker drains", || async {
            let workers =
                operator.admin().list_workers(ListWorkersRequest::default()).await.ok()?;
            let worker = workers.into_inner().workers.into_iter().next()?;
            (worker.state() == WorkerState::Draining && worker.sessions == 1).then_some(())
        })
        .await;
        let directories = cluster.session_directories()?;
        let directory = directories.iter().find(|directory| directory.join("begun").exists());
        std::fs::write(directory.context("the session's directory")?.join("go"), "")?;
        anyhow::Ok(())
    };
    let (done, ended) = tokio::join!(Process::finish(wait, b""), end_run);
    ended?;
    let done = done?;
    assert!(done.code == Some(0) && done.stderr.contains("1 sessions"), "{done:?}");
    let worker: serde_json::Value = serde_json::from_str(&done.stdout)?;
    assert!(worker["sessions"].is_null() && worker["state"] == "WORKER_STATE_DRAINING", "{worker}");
    assert_eq!(operator.watch_to_end(&run.name, 0).await?.outcome(), Kind::Exited(4));
    let undrain =
        Process::finish(cluster.cli(&operator, &["workers", "undrain", "worker-0"]), b"").await?;
    assert_eq!(undrain.code, Some(0));
    cluster.end().await
}
