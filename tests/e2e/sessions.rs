//! Sessions: directories, aliases, expiry.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use anyhow::Result;
use codelia_proto::{
    duration_to_proto,
    v1::{CreateSessionRequest, ExtendSessionRequest, SessionEndReason, SessionState},
};
use codelia_tests::{Client, Cluster, eventually, refusal, shell};
use tonic::Code;

/// Runs a command that prints the session's directory and creates files in it.
async fn directory(client: &Client, session: &str) -> Result<String> {
    let seen = client.exec(session, "pwd; mkdir -p a/b; echo x > a/b/c; chmod 000 a/b").await?;
    Ok(seen.stdout_text().trim().to_owned())
}

async fn removed(directory: &str) {
    eventually(("the directory is removed", directory), || async {
        (!Path::new(directory).exists()).then_some(())
    })
    .await;
}

async fn ended_as(client: &Client, session: &str, reason: SessionEndReason) {
    eventually(("the session ended as", reason), || async {
        let session = client.get_session(session).await.ok()?;
        (session.state() == SessionState::Ended && session.end_reason() == reason).then_some(())
    })
    .await;
}

#[tokio::test]
async fn session_directory_is_private_and_removed_on_close() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let directory = directory(&client, &session.name).await?;
    assert_eq!(fs::metadata(&directory)?.permissions().mode() & 0o7777, 0o700);
    assert_eq!(cluster.session_directories()?.len(), 1);

    let closed = client.close(&session.name).await?;
    assert_eq!(
        (closed.state(), closed.end_reason()),
        (SessionState::Ended, SessionEndReason::Closed)
    );
    removed(&directory).await;
    assert_eq!(
        client.close(&session.name).await?.end_time,
        closed.end_time,
        "closing twice succeeds"
    );
    let refused = refusal(
        &client
            .start(shell(&session.name, "true"))
            .await
            .expect_err("an ended session takes no runs"),
    );
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::FailedPrecondition, "SESSION_ENDED")
    );
    cluster.end().await
}

#[tokio::test]
async fn session_expires_after_ttl() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let ttl = Some(duration_to_proto(Duration::from_secs(1)));
    let session = client.create(CreateSessionRequest { ttl, ..Default::default() }).await?;
    let directory = directory(&client, &session.name).await?;
    ended_as(&client, &session.name, SessionEndReason::Expired).await;
    removed(&directory).await;
    cluster.end().await
}

#[tokio::test]
async fn idle_session_ends_but_busy_one_stays() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let idle_ttl = Some(duration_to_proto(Duration::from_millis(1200)));
    let session = client.create(CreateSessionRequest { idle_ttl, ..Default::default() }).await?;
    let directory = directory(&client, &session.name).await?;
    // A run longer than the idle time keeps the session open.
    let seen = client.exec(&session.name, "sleep 2; echo still here").await?;
    assert_eq!(seen.stdout_text(), "still here\n");
    assert!(Path::new(&directory).exists());
    ended_as(&client, &session.name, SessionEndReason::Idle).await;
    removed(&directory).await;
    cluster.end().await
}

#[tokio::test]
async fn session_can_be_extended_while_open() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let day = Some(duration_to_proto(Duration::from_secs(86_400)));
    let extend = ExtendSessionRequest { name: session.name.clone(), ttl: day };
    let extended = client
        .sessions()
        .extend_session(extend.clone())
        .await?
        .into_inner()
        .session
        .unwrap_or_default();
    let seconds =
        |session: &codelia_proto::v1::Session| session.expire_time.map(|time| time.seconds);
    assert!(seconds(&extended) > seconds(&session));
    client.close(&session.name).await?;
    let refused = refusal(
        &client.sessions().extend_session(extend).await.expect_err("the session has ended"),
    );
    assert_eq!(refused.code, Code::FailedPrecondition);
    cluster.end().await
}

#[tokio::test]
async fn alias_names_one_open_session_per_tenant() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let named = || CreateSessionRequest { alias: "work".into(), ..Default::default() };
    let first = client.create(named()).await?;
    assert_eq!(client.get_session("sessions/work").await?.session_id, first.session_id);
    assert_eq!(client.exec("sessions/work", "echo hi").await?.run().session_id, first.session_id);
    let refused = refusal(&client.create(named()).await.expect_err("the alias is taken"));
    assert_eq!((refused.code, refused.reason.as_str()), (Code::AlreadyExists, "ALIAS_IN_USE"));
    cluster.tenant("b").await?.create(named()).await?;
    client.close("sessions/work").await?;
    let second = client.create(named()).await?;
    assert_ne!(second.session_id, first.session_id, "the alias is free again");
    cluster.end().await
}

#[tokio::test]
async fn sessions_have_separate_directories() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let (one, two) = (client.session().await?, client.session().await?);
    client.exec(&one.name, "echo x > mine").await?;
    assert_eq!(client.exec(&two.name, "ls -A | wc -l").await?.stdout_text().trim(), "0");
    assert_eq!(client.exec(&one.name, "cat mine").await?.stdout_text(), "x\n");
    cluster.end().await
}
