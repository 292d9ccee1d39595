//! A retry with the same idempotency key returns the first result.

use anyhow::Result;
use codelia_proto::v1::{CreateSessionRequest, StartRunRequest, outcome::Kind};
use codelia_tests::{Cluster, ClusterOptions, Exec, refusal, shell};
use futures::future::try_join_all;
use tonic::Code;

fn once(session: &str, script: &str, key: &str) -> StartRunRequest {
    StartRunRequest { idempotency_key: key.to_owned(), ..shell(session, script) }
}

#[tokio::test]
async fn same_key_returns_first_session() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let request =
        CreateSessionRequest { idempotency_key: "k".into(), alias: "x".into(), ..Default::default() };
    let first = client.create(request.clone()).await?;
    assert_eq!(client.create(request.clone()).await?.session_id, first.session_id);

    let other = CreateSessionRequest { alias: "y".into(), ..request.clone() };
    let refused = refusal(&client.create(other).await.expect_err("another request with the same key"));
    assert_eq!((refused.code, refused.reason.as_str()), (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED"));

    let neighbour = cluster.tenant("b").await?;
    assert_ne!(neighbour.create(request).await?.session_id, first.session_id, "keys are scoped to a tenant");
    cluster.end().await
}

#[tokio::test]
async fn same_key_returns_first_run() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let request = once(&session.name, "echo x >> log", "k");
    let first = client.start(request.clone()).await?;
    client.watch_to_end(&first.name, 0).await?;
    let again = client.start(request).await?;
    assert_eq!(again.run_id, first.run_id);
    assert!(again.outcome.is_some(), "a retry after the end returns the result");
    let refused =
        refusal(&client.start(once(&session.name, "true", "k")).await.expect_err("another request"));
    assert_eq!((refused.code, refused.reason.as_str()), (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED"));
    assert_eq!(client.exec(&session.name, "cat log").await?.stdout_text(), "x\n");
    cluster.end().await
}

#[tokio::test]
async fn concurrent_starts_with_one_key_execute_once() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 2, workers: 2, ..ClusterOptions::default() }).await?;
    let first = cluster.tenant("a").await?;
    let second = codelia_tests::Client::connect(&cluster.endpoint(1), &first.secret).await?;
    let session = first.session().await?;
    let calls = (0..20).map(|call| {
        let client = if call % 2 == 0 { &first } else { &second };
        client.start(once(&session.name, "echo x >> log", "k"))
    });
    let runs = try_join_all(calls).await?;
    assert!(runs.iter().all(|run| run.run_id == runs[0].run_id));
    assert_eq!(first.watch_to_end(&runs[0].name, 0).await?.outcome(), Kind::Exited(0));
    assert_eq!(first.exec(&session.name, "cat log").await?.stdout_text(), "x\n");
    cluster.end().await
}

#[tokio::test]
async fn exec_with_used_key_watches_first_run() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let request = once(&session.name, "echo x | tee -a log", "k");
    let first = Exec::start(&client, request.clone()).await?.finish().await?;
    let second = Exec::start(&client, request).await?.finish().await?;
    assert_eq!(first.run().run_id, second.run().run_id);
    assert_eq!(second.stdout_text(), "x\n");
    assert_eq!(client.exec(&session.name, "cat log").await?.stdout_text(), "x\n");
    cluster.end().await
}
