//! Runs that wait for a worker: the caller reads why, and no run waits forever.

use anyhow::Result;
use codelia_proto::v1::outcome;
use codelia_tests::{Cluster, ClusterOptions, Exec, Terminal, eventually, shell};

async fn without_workers() -> Result<Cluster> {
    Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await
}

#[tokio::test]
async fn run_says_why_it_waits() -> Result<()> {
    let mut cluster = without_workers().await?;
    let client = cluster.tenant("a").await?;
    let mut terminal =
        Terminal::start(&cluster.cli(&client, &["run", "--", "echo", "hello"]), 120, 24)?;
    terminal.shows("waiting for a worker (none ready: no worker is running)").await?;
    cluster.add_worker().await?;
    terminal.shows("hello").await?;
    assert_eq!(terminal.exited().await?.code(), Some(0));
    cluster.end().await
}

#[tokio::test]
async fn run_gives_up_after_queue_timeout() -> Result<()> {
    let cluster = without_workers().await?;
    let client = cluster.tenant("a").await?;
    let run = cluster.cli(&client, &["run", "--queue-timeout", "2s", "--", "true"]);
    let mut terminal = Terminal::start(&run, 200, 24)?;
    terminal.shows("no worker took the run in 2s (none ready: no worker is running)").await?;
    terminal.shows("QUEUE_TIMEOUT").await?;
    assert_eq!(terminal.exited().await?.code(), Some(125));
    cluster.end().await
}

#[tokio::test]
async fn waiting_message_names_busy_workers() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { slots: 1, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let (first, second) = (client.session().await?, client.session().await?);
    let mut busy = Exec::start(&client, shell(&first.name, "sleep 1000")).await?;
    busy.until_started().await?;
    let mut waiting = Exec::start(&client, shell(&second.name, "echo ran")).await?;
    let is_busy =
        |reasons: &[String]| reasons.iter().any(|reason| reason.contains("all workers are busy"));
    waiting.until("the reason", |seen| is_busy(&seen.waiting)).await?;
    drop(busy);
    assert_eq!(waiting.finish().await?.stdout_text(), "ran\n");
    cluster.end().await
}

#[tokio::test]
async fn unwatched_run_ends_after_configured_queue_timeout() -> Result<()> {
    let settings = vec![("CODELIA_LIMITS_QUEUE_TIMEOUT", "1s".to_owned())];
    let options = ClusterOptions { workers: 0, settings, ..ClusterOptions::default() };
    let cluster = Cluster::start_with(options).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, "true")).await?;
    let outcome = eventually("the run ends", || async {
        client.get_run(&run.name).await.ok()?.outcome?.kind
    })
    .await;
    let outcome::Kind::Refused(refused) = outcome else { panic!("{outcome:?}") };
    assert_eq!(refused.reason, "QUEUE_TIMEOUT");
    cluster.end().await
}
