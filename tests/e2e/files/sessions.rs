//! File calls and the lease and idle time of their session.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::Result;
use codelia_proto::{duration_to_proto, v1::*};
use codelia_tests::{Cluster, ClusterOptions, eventually};
use codelia_types::{LeaseEpoch, Mode};

use super::workspace::{directory, outcome};

#[tokio::test]
async fn file_call_acquires_unleased_session() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    assert_eq!(session.worker_id, "", "no worker holds it");
    cluster.add_worker().await?;
    client.put(&session.name, "file", "text").await?;
    assert_eq!(client.get_session(&session.name).await?.worker_id, "worker-0");
    // A worker that takes it again finds its files, and reports their loss.
    cluster.workers[0].process.terminate().await?;
    cluster.restart_worker(0).await?;
    let served = || async { client.get(&session.name, "file").await.ok() };
    assert_eq!(eventually("the session is served again", served).await, "text");
    let files = directory(&cluster, &session)?;
    cluster.workers[0].process.terminate().await?;
    fs::remove_dir_all(files)?;
    cluster.restart_worker(0).await?;
    let lost = || async {
        (outcome(client.get(&session.name, "file").await).1 == "SESSION_DATA_LOST").then_some(())
    };
    eventually("the loss is reported", lost).await;
    cluster.end().await
}

#[tokio::test]
async fn file_call_reaches_session_whose_acquisition_was_not_answered() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.put(&session.name, "old", "text").await?;
    cluster.workers[0].process.terminate().await?;
    let new = client.session().await?;
    cluster.restart_worker(0).await?;
    // The store gives the sessions to the worker, and the worker does not learn of it.
    for (session, epoch) in [(&session, 2), (&new, 1)] {
        let id = session.session_id.parse()?;
        let candidates = cluster.store.worker_candidates(id, Mode::Logical).await?;
        let lease =
            cluster.store.lease_acquire(id, &candidates[0].id, candidates[0].incarnation).await?;
        let epochs = lease.map(|lease| lease.token.epoch);
        assert_eq!(epochs, Some(LeaseEpoch(epoch)), "the control: the store knows the lease");
        let written = || async { client.put(&session.name, "new", "text").await.ok() };
        eventually("the worker takes the session", written).await;
        assert_eq!(client.get(&session.name, "new").await?, "text");
    }
    assert_eq!(client.get(&session.name, "old").await?, "text");
    cluster.end().await
}

#[tokio::test]
async fn file_calls_keep_session_active() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let idle_ttl = Duration::from_millis(2500);
    let idle =
        CreateSessionRequest { idle_ttl: Some(duration_to_proto(idle_ttl)), ..Default::default() };
    let session = client.create(idle).await?;
    let begun = Instant::now();
    while begun.elapsed() < idle_ttl * 2 {
        client.put(&session.name, "file", "text").await?;
    }
    assert_eq!(client.get_session(&session.name).await?.state(), SessionState::Open);
    let ended = || async {
        let session = client.get_session(&session.name).await.ok()?;
        (session.end_reason() == SessionEndReason::Idle).then_some(())
    };
    eventually("the session ends as idle", ended).await;
    cluster.end().await
}
