//! Many sessions over two apis and two workers.

use std::collections::HashSet;

use anyhow::{Result, ensure};
use codelia_proto::v1::{Run, Session, outcome::Kind::Exited};
use codelia_tests::{Client, Cluster, ClusterOptions, shell};
use futures::{StreamExt, TryStreamExt, stream};

const SESSIONS: usize = 200;
const RUNS: usize = 5;

/// Runs one session over both apis: alternates `Exec` with `StartRun` and `WatchRun`.
async fn run_session(clients: &[Client; 2], number: usize) -> Result<(Session, Vec<Run>)> {
    let client = |step: usize| &clients[(number + step) % 2];
    let session = client(0).session().await?;
    let mut runs = Vec::new();
    for step in 0..RUNS {
        // One line per execution.
        let request = shell(&session.name, &format!("echo {step} >> log; cat log"));
        let seen = if step % 2 == 0 {
            codelia_tests::Exec::start(client(step), request).await?.finish().await?
        } else {
            let run = client(step).start(request).await?;
            client(step + 1).watch_to_end(&run.name, 0).await?
        };
        ensure!(seen.outcome() == Exited(0), "{seen:?}");
        let log: String = (0..=step).map(|step| format!("{step}\n")).collect();
        ensure!(
            seen.stdout_text() == log,
            "run {step} of session {number} saw {:?}",
            seen.stdout_text()
        );
        runs.push(seen.run().clone());
    }
    let session = client(1).get_session(&session.name).await?;
    Ok((session, runs))
}

#[tokio::test]
async fn every_run_ends_once_on_its_lease_holder() -> Result<()> {
    let cluster = Cluster::start_with(ClusterOptions {
        apis: 2,
        workers: 2,
        slots: 8,
        ..ClusterOptions::default()
    })
    .await?;
    let first = cluster.tenant("a").await?;
    let second = Client::connect(&cluster.endpoint(1), &first.secret).await?;
    let clients = [first, second];
    let results: Vec<_> = stream::iter(0..SESSIONS)
        .map(|number| run_session(&clients, number))
        .buffer_unordered(16)
        .try_collect()
        .await?;

    let mut holders = HashSet::new();
    for (session, runs) in &results {
        assert_eq!(session.lease_epoch, 1, "the lease of {} moved", session.name);
        assert!(runs.iter().all(|run| run.worker_id == session.worker_id), "{session:?}");
        holders.insert(session.worker_id.clone());
    }
    assert_eq!(holders.len(), 2, "both workers have sessions");
    let expected = i64::try_from(SESSIONS * RUNS)?;
    assert_eq!(cluster.database.number("SELECT count(*) FROM runs").await?, expected);
    let clean = "SELECT count(*) FROM runs WHERE state = 'ended' AND outcome->>'kind' = 'exited' AND attempt = 1";
    assert_eq!(cluster.database.number(clean).await?, expected);
    cluster.end().await
}
