//! Every quota is enforced and named in the refusal.

use anyhow::Result;
use codelia_proto::v1::{ListSessionsRequest, RunState};
use codelia_store::Quotas;
use codelia_tests::{Cluster, ClusterOptions, eventually, refusal, shell};
use tonic::{Code, Status};

/// A run that ends when a file appears.
const WAITING: &str = "until [ -e go ]; do sleep 0.05; done";

fn assert_quota<T: std::fmt::Debug>(result: Result<T, Status>, quota: &str) {
    let refused = refusal(&result.expect_err("over the quota"));
    assert_eq!(refused.code, Code::ResourceExhausted, "{refused:?}");
    assert!(refused.quotas.iter().any(|name| name == quota), "{refused:?}");
    assert!(refused.quotas.len() > 1, "QuotaFailure in addition to ErrorInfo: {refused:?}");
}

#[tokio::test]
async fn sessions_quota_is_enforced() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant_with("a", Quotas { sessions: 2, ..Quotas::default() }).await?;
    let first = client.session().await?;
    client.session().await?;
    assert_quota(client.session().await, "sessions");
    cluster.tenant("b").await?.session().await?;
    client.close(&first.name).await?;
    client.session().await?;
    cluster.end().await
}

#[tokio::test]
async fn concurrent_runs_quota_is_enforced() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client =
        cluster.tenant_with("a", Quotas { concurrent_runs: 2, ..Quotas::default() }).await?;
    let session = client.session().await?;
    let first = client.start(shell(&session.name, WAITING)).await?;
    client.start(shell(&session.name, WAITING)).await?;
    assert_quota(client.start(shell(&session.name, "true")).await, "concurrent_runs");
    client
        .runs()
        .cancel_run(codelia_proto::v1::CancelRunRequest {
            name: first.name.clone(),
            ..Default::default()
        })
        .await?;
    client.watch_to_end(&first.name, 0).await?;
    client.start(shell(&session.name, "touch go")).await?;
    cluster.end().await
}

#[tokio::test]
async fn queued_runs_quota_is_enforced() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { slots: 1, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant_with("a", Quotas { queued_runs: 1, ..Quotas::default() }).await?;
    let session = client.session().await?;
    let holding = client.start(shell(&session.name, WAITING)).await?;
    eventually("the first run is running", || async {
        let run = client.get_run(&holding.name).await.ok()?;
        (run.state() == RunState::Running).then_some(())
    })
    .await;
    let waiting = client.start(shell(&session.name, "true")).await?;
    eventually("the second run is queued", || async {
        let run = client.get_run(&waiting.name).await.ok()?;
        (run.state() == RunState::Queued).then_some(())
    })
    .await;
    assert_quota(client.start(shell(&session.name, "true")).await, "queued_runs");
    cluster.end().await
}

#[tokio::test]
async fn request_rate_quota_returns_retry_delay() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client =
        cluster.tenant_with("a", Quotas { requests_per_second: 5, ..Quotas::default() }).await?;
    let neighbour = cluster.tenant("b").await?;
    let mut refused = None;
    for _ in 0..200 {
        if let Err(status) = client.sessions().list_sessions(ListSessionsRequest::default()).await {
            refused = Some(status);
            break;
        }
    }
    let refused = refused.expect("200 requests at 5 per second");
    assert!(refusal(&refused).retry_after.is_some(), "{refused:?}");
    assert_quota::<()>(Err(refused), "requests_per_second");
    neighbour.sessions().list_sessions(ListSessionsRequest::default()).await?;
    cluster.end().await
}

#[tokio::test]
async fn output_bytes_quota_is_enforced() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client =
        cluster.tenant_with("a", Quotas { output_bytes: 10_000, ..Quotas::default() }).await?;
    let session = client.session().await?;
    client.exec(&session.name, "head -c 20000 /dev/zero").await?;
    // The count is cached for a short time.
    let refused = eventually("the quota is enforced", || async {
        client.start(shell(&session.name, "true")).await.err()
    })
    .await;
    assert_quota::<()>(Err(refused), "output_bytes");
    cluster.end().await
}
