//! Event streams of the api, with a real Postgres and a worker that follows a script.

mod scripted;

use anyhow::Result;
use codelia_proto::{
    internal::v1::attach_run_request::Kind as Input,
    v1::{self, WatchRunRequest, exec_request, outcome},
};
use codelia_tests::{Exec, command, eventually, refusal};
use codelia_types::Outcome;
use scripted::{Api, Step};
use tonic::{Code, Request};

#[tokio::test]
async fn events_are_ordered_and_output_sent_once() -> Result<()> {
    let api = Api::start().await?;
    let run = api.client.start(command(&api.session, &["true"])).await?;
    let first = [
        Step::Assigned,
        Step::Started,
        Step::Output(0, "ab"),
        Step::Store(0, "abcdef"),
        // A slow watcher reads this part from the store, then follows the worker again.
        Step::StoredUntil(6),
        Step::Output(6, "gh"),
        Step::Break,
    ];
    let second = [
        Step::Assigned,
        Step::Started,
        // The client has the first two bytes.
        Step::Output(6, "ghij"),
        // The bytes in between are stored.
        Step::Store(6, "ghijkl"),
        Step::Output(12, "mn"),
        Step::Commit(12, "mn", Outcome::Exited(3)),
        Step::Committed,
    ];
    let watch = {
        let (client, name) = (api.client.clone(), run.name.clone());
        codelia_telemetry::task::background(
            "watch",
            async move { client.watch_to_end(&name, 0).await },
        )
    };
    assert_eq!(api.worker.attached(&first).await.position, 0);
    assert_eq!(api.worker.attached(&second).await.position, 8);
    let seen = watch.await??;
    assert_eq!(seen.stdout_text(), "abcdefghijklmn");
    assert_eq!(seen.outcome(), outcome::Kind::Exited(3));
    assert!(seen.assigned.is_some() && seen.started.is_some());
    api.end().await
}

#[tokio::test]
async fn ended_run_is_read_from_store_at_any_position() -> Result<()> {
    let api = Api::start().await?;
    let mut exec = Exec::start(&api.client, command(&api.session, &["true"])).await?;
    api.worker.attached(&[Step::Commit(0, "abcdef", Outcome::Exited(0)), Step::Committed]).await;
    while exec.advance().await? {}
    let name = exec.transcript.run().name.clone();
    for (position, rest) in [(0, "abcdef"), (4, "ef"), (6, ""), (99, "")] {
        let seen = api.client.watch_to_end(&name, position).await?;
        assert_eq!(seen.stdout_text(), rest);
        assert!(seen.queued.is_some() && seen.assigned.is_some() && seen.started.is_some());
    }
    api.end().await
}

#[tokio::test]
async fn start_of_quick_run_precedes_its_output() -> Result<()> {
    let api = Api::start().await?;
    let mut exec = Exec::start(&api.client, command(&api.session, &["true"])).await?;
    let quick = [
        Step::Assigned,
        Step::Commit(0, "x", Outcome::Exited(0)),
        Step::Output(0, "x"),
        Step::Committed,
    ];
    api.worker.attached(&quick).await;
    exec.until("output", |seen| !seen.stdout.is_empty()).await?;
    assert!(exec.transcript.started.is_some());
    assert_eq!(exec.finish().await?.stdout_text(), "x");
    api.end().await
}

#[tokio::test]
async fn worker_that_does_not_know_run_is_retried() -> Result<()> {
    let api = Api::start().await?;
    let mut exec = Exec::start(&api.client, command(&api.session, &["true"])).await?;
    for attempt in 0..6 {
        assert_eq!(api.worker.attached(&[Step::Unknown]).await.pushed, attempt == 0);
    }
    api.worker
        .attached(&[Step::Started, Step::Commit(0, "", Outcome::Exited(0)), Step::Committed])
        .await;
    while exec.advance().await? {}
    assert_eq!(exec.transcript.outcome(), outcome::Kind::Exited(0));
    api.end().await
}

#[tokio::test]
async fn input_is_ordered_and_ends_with_the_requests() -> Result<()> {
    let api = Api::start().await?;
    let request = |kind| v1::ExecRequest { kind: Some(kind) };
    let requests = [
        request(exec_request::Kind::Start(command(&api.session, &["cat"]))),
        request(exec_request::Kind::Stdin(b"a".to_vec())),
        request(exec_request::Kind::Resize(v1::Terminal { columns: 80, rows: 24 })),
        request(exec_request::Kind::Signal(2)),
        request(exec_request::Kind::Stdin(b"b".to_vec())),
    ];
    let mut events = api.client.runs().exec(tokio_stream::iter(requests)).await?.into_inner();
    let mut attached = api.worker.attached(&[Step::Assigned, Step::Started]).await;
    assert!(attached.owner);
    let mut inputs = Vec::new();
    while !matches!(inputs.last(), Some(Input::CloseStdin(_))) {
        inputs.push(attached.input().await);
    }
    assert!(matches!(
        &inputs[..],
        [Input::Stdin(a), Input::Resize(_), Input::Signal(2), Input::Stdin(b), Input::CloseStdin(_)]
            if a == b"a" && b == b"b"
    ));
    attached.play(&[Step::Commit(0, "", Outcome::Exited(0)), Step::Committed]).await;
    while events.message().await?.is_some() {}
    api.end().await
}

#[tokio::test]
async fn run_is_canceled_when_caller_disconnects() -> Result<()> {
    let api = Api::start().await?;
    let mut exec = Exec::start(&api.client, command(&api.session, &["sleep", "60"])).await?;
    let mut attached = api.worker.attached(&[Step::Assigned, Step::Started]).await;
    exec.until_started().await?;
    drop(exec);
    attached.closed().await;
    eventually("the run is canceled", || api.worker.canceled()).await;
    api.end().await
}

#[tokio::test]
async fn detached_run_survives_its_caller() -> Result<()> {
    let api = Api::start().await?;
    let mut exec = Exec::start(&api.client, command(&api.session, &["sleep", "60"])).await?;
    let mut attached = api.worker.attached(&[Step::Assigned, Step::Started]).await;
    exec.until_started().await?;
    exec.detach().await?;
    assert!(matches!(attached.input().await, Input::Detach(_)));
    let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    drop(exec);
    attached.closed().await;
    assert!(!api.is_cancel_requested(&name).await?);
    api.end().await
}

#[tokio::test]
async fn disconnected_watcher_does_not_cancel_run() -> Result<()> {
    let api = Api::start().await?;
    let run = api.client.start(command(&api.session, &["sleep", "60"])).await?;
    let attach = WatchRunRequest { name: run.name.clone(), position: 0, ..Default::default() };
    let exec = Exec::open(&api.client, exec_request::Kind::Attach(attach), 0).await?;
    let mut attached = api.worker.attached(&[Step::Assigned, Step::Started]).await;
    assert!(!attached.owner);
    drop(exec);
    attached.closed().await;
    assert!(!api.is_cancel_requested(&run.name).await?);
    api.end().await
}

#[tokio::test]
async fn revoked_key_is_rejected_immediately() -> Result<()> {
    let api = Api::start().await?;
    let unknown = api.client.with_secret(&codelia_api::generate_secret().0)?;
    let status = unknown.get_session(&api.session).await.unwrap_err();
    assert_eq!(refusal(&status).reason, "KEY_INVALID");
    api.revoke_key().await?;
    let status = api.client.get_session(&api.session).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    api.end().await
}

#[tokio::test]
async fn oversized_request_is_an_invalid_field() -> Result<()> {
    let api = Api::start().await?;
    let large = v1::GetSessionRequest { name: "x".repeat(5 << 20) };
    let status = api.client.sessions().get_session(large).await.unwrap_err();
    assert_eq!(
        (refusal(&status).code, refusal(&status).fields),
        (Code::InvalidArgument, vec!["request".into()])
    );
    let mut many = command(&api.session, &["true"]);
    if let Some(command) = &mut many.command {
        command.env = (0..100_000).map(|n| (format!("VARIABLE_{n}"), "value".into())).collect();
    }
    let status = api.client.start(many).await.unwrap_err();
    assert_eq!(
        (refusal(&status).code, refusal(&status).fields),
        (Code::InvalidArgument, vec!["command.env".into()])
    );
    api.end().await
}

#[tokio::test]
async fn watch_ends_at_deadline_and_returns_request_id() -> Result<()> {
    let api = Api::start().await?;
    let run = api.client.start(command(&api.session, &["sleep", "60"])).await?;
    let mut request =
        Request::new(WatchRunRequest { name: run.name, position: 0, ..Default::default() });
    request.set_timeout(std::time::Duration::from_millis(300));
    request.metadata_mut().insert("x-request-id", "mine".parse()?);
    let response = api.client.runs().watch_run(request).await?;
    assert_eq!(
        response.metadata().get("x-request-id").and_then(|id| id.to_str().ok()),
        Some("mine")
    );
    let mut events = response.into_inner();
    let ended = loop {
        match events.message().await {
            Ok(Some(_)) => {}
            Ok(None) => break None,
            Err(status) => break Some(refusal(&status).reason),
        }
    };
    assert_eq!(ended.as_deref(), Some("DEADLINE_EXCEEDED"));
    api.end().await
}

#[tokio::test]
async fn shutdown_grace_ends_open_streams() -> Result<()> {
    let api = Api::start().await?;
    let run = api.client.start(command(&api.session, &["sleep", "60"])).await?;
    let mut events = api.client.watch(&run.name, 0).await?;
    assert!(events.message().await?.is_some());
    let database = api.stop().await?;
    let status = loop {
        match events.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without an error"),
            Err(status) => break status,
        }
    };
    assert_eq!(refusal(&status).reason, "SHUTTING_DOWN");
    database.end().await
}
