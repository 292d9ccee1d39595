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
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let request = CreateSessionRequest {
        idempotency_key: "k".into(),
        alias: "x".into(),
        ..Default::default()
    };
    let first = client.create(request.clone()).await?;
    assert_eq!(client.create(request.clone()).await?.session_id, first.session_id);

    let other = CreateSessionRequest { alias: "y".into(), ..request.clone() };
    let refused =
        refusal(&client.create(other).await.expect_err("another request with the same key"));
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED")
    );

    let neighbour = cluster.tenant("b").await?;
    assert_ne!(
        neighbour.create(request).await?.session_id,
        first.session_id,
        "keys are scoped to a tenant"
    );
    cluster.end().await
}

#[tokio::test]
async fn same_key_returns_first_run() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let request = once(&session.name, "echo x >> log", "k");
    let first = client.start(request.clone()).await?;
    client.watch_to_end(&first.name, 0).await?;
    let again = client.start(request).await?;
    assert_eq!(again.run_id, first.run_id);
    assert!(again.outcome.is_some(), "a retry after the end returns the result");
    let refused = refusal(
        &client.start(once(&session.name, "true", "k")).await.expect_err("another request"),
    );
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED")
    );
    assert_eq!(client.exec(&session.name, "cat log").await?.stdout_text(), "x\n");
    cluster.end().await
}

#[tokio::test]
async fn same_key_creates_one_session_for_its_run() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let new_session = Some(CreateSessionRequest { labels: labels("x"), ..Default::default() });
    let request = StartRunRequest { new_session, ..once("", "echo hello", "k") };
    let runs = try_join_all((0..4).map(|_| client.start(request.clone()))).await?;
    assert!(runs.iter().all(|run| run.run_id == runs[0].run_id));
    assert_eq!(client.watch_to_end(&runs[0].name, 0).await?.stdout_text(), "hello\n");
    assert_eq!(client.start(request.clone()).await?.run_id, runs[0].run_id);
    assert_eq!(cluster.database.number("SELECT count(*) FROM sessions").await?, 1);

    let exec = StartRunRequest { idempotency_key: "exec".into(), ..request.clone() };
    for _ in 0..2 {
        let seen = Exec::start(&client, exec.clone()).await?.finish().await?;
        assert_eq!(seen.stdout_text(), "hello\n");
    }
    assert_eq!(cluster.database.number("SELECT count(*) FROM sessions").await?, 2);

    let new_session = Some(CreateSessionRequest { labels: labels("y"), ..Default::default() });
    let other = StartRunRequest { new_session, ..request };
    let refused =
        refusal(&client.start(other).await.expect_err("another session with the same key"));
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED")
    );
    cluster.end().await
}

#[tokio::test]
async fn refused_run_leaves_no_open_session() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let new =
        |request| StartRunRequest { new_session: Some(CreateSessionRequest::default()), ..request };
    let open = "SELECT count(*) FROM sessions WHERE state = 'open'";
    // The control: the session of a run that is not refused stays open.
    client.start(new(shell("", "true"))).await?;
    assert_eq!(cluster.database.number(open).await?, 1);

    let both = client.start(new(shell("sessions/x", "true"))).await.expect_err("two sessions");
    assert_eq!(refusal(&both).fields, ["parent"]);
    let nothing = StartRunRequest { command: None, ..shell("", "true") };
    let nothing = client.start(new(nothing)).await.expect_err("no command");
    assert_eq!(refusal(&nothing).code, Code::InvalidArgument);
    assert_eq!(
        cluster.database.number("SELECT count(*) FROM sessions").await?,
        1,
        "none was created"
    );

    let tool = StartRunRequest { tool: "tools/nosuch".into(), ..shell("", "true") };
    let tool = client.start(new(tool)).await.expect_err("an unknown tool");
    assert_eq!(refusal(&tool).code, Code::NotFound);
    assert_eq!(cluster.database.number("SELECT count(*) FROM sessions").await?, 2);
    assert_eq!(cluster.database.number(open).await?, 1, "it was closed");
    cluster.end().await
}

fn labels(value: &str) -> std::collections::HashMap<String, String> {
    [("l".to_owned(), value.to_owned())].into()
}

#[tokio::test]
async fn concurrent_starts_with_one_key_execute_once() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 2, workers: 2, ..ClusterOptions::default() })
            .await?;
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
    let cluster = Cluster::shared().await?;
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
