//! JSON calls: one message, lines, and the streams of Connect.

use anyhow::{Context, Result};
use base64::{Engine, engine::general_purpose::STANDARD};
use codelia_tests::{Cluster, Process};
use serde_json::{Value, json};

use super::{WebCaller, prefixed, split};

/// The output in an event of a run.
fn output(event: &Value) -> String {
    let data = event["event"]["output"]["data"].as_str().unwrap_or_default();
    String::from_utf8_lossy(&STANDARD.decode(data).unwrap_or_default()).into_owned()
}

#[tokio::test]
async fn json_calls_create_run_and_stream() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let caller = WebCaller::new(&cluster, &cluster.tenant("a").await?);
    let session = caller.json("SessionService/CreateSession", &json!({ "alias": "dev" })).await?;
    assert_eq!((session.status, session.header("content-type")), (200, "application/json"));
    assert_eq!(session.json().await?["session"]["alias"], "dev");

    let run = caller
        .start("sessions/dev", "echo first; until [ -e go ]; do sleep 0.05; done; cat go")
        .await?;
    let mut events = caller.json("RunService/WatchRun", &json!({ "name": run })).await?;
    assert_eq!((events.status, events.header("content-type")), (200, "application/x-ndjson"));
    let mut text = String::new();
    while text != "first\n" {
        let line = events.line().await?.context("the stream ended")?;
        text += &output(&serde_json::from_str(&line)?);
    }
    // The run waits for this file, so its first output was streamed while it ran.
    let lines = [
        json!({ "open": { "parent": "sessions/dev", "path": "go" } }),
        json!({ "data": STANDARD.encode("second\n") }),
        json!({ "finish": {} }),
    ];
    let body = lines.map(|line| format!("{line}\n")).concat();
    let written = caller.call("FileService/WriteFile", "application/x-ndjson", body).await?;
    assert_eq!(written.status, 200);
    assert_eq!(written.json().await?["file"]["sizeBytes"], "7", "64-bit numbers are text");
    let mut last = Value::Null;
    while let Some(line) = events.line().await? {
        last = serde_json::from_str(&line)?;
        text += &output(&last);
    }
    assert_eq!(text, "first\nsecond\n");
    assert_eq!(last["event"]["finished"]["run"]["state"], "RUN_STATE_ENDED");
    cluster.end().await
}

#[tokio::test]
async fn command_line_prints_json_of_the_api() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let session = client.session().await?.name;
    client.exec(&session, "echo out; exit 3").await?;
    for (words, method, request, field) in [
        ("info --json", "InfoService/GetServerInfo", json!({}), "serverInfo"),
        ("ps --all --json", "RunService/ListRuns", json!({ "parent": session }), "runs"),
    ] {
        let arguments: Vec<&str> = words.split(' ').collect();
        let done = Process::finish(cluster.cli(&client, &arguments), b"").await?;
        let printed: Value =
            serde_json::from_str(&done.stdout).with_context(|| format!("{done:?}"))?;
        assert_eq!(printed, caller.json(method, &request).await?.json().await?[field]);
    }
    cluster.end().await
}

#[tokio::test]
async fn one_json_call_runs_and_streams() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let parent = client.session().await?.name;
    let start =
        json!({ "start": { "parent": parent, "command": { "argv": ["echo", "one call"] } } });
    let events = caller.json("RunService/Exec", &start).await?.text().await?;
    let events: Vec<Value> = events.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    assert_eq!(events.iter().map(output).collect::<String>(), "one call\n");
    assert!(
        events.last().is_some_and(|event| event["event"]["finished"].is_object()),
        "{events:?}"
    );
    cluster.end().await
}

#[tokio::test]
async fn json_errors_have_status_code_and_details() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let stranger = WebCaller {
        secret: format!("cdl_{}", "x".repeat(43)),
        ..WebCaller::new(&cluster, &client)
    };
    let unknown = json!({ "name": "sessions/nosuch" });
    let refused = stranger.json("SessionService/GetSession", &unknown).await?;
    assert_eq!(
        (refused.status, refused.json().await?["code"].as_str()),
        (401, Some("unauthenticated"))
    );

    let refused = caller.json("SessionService/GetSession", &unknown).await?;
    assert_eq!((refused.status, refused.header("content-type")), (404, "application/json"));
    assert!(!refused.headers.contains_key("grpc-status"), "{:?}", refused.headers);
    let error = refused.json().await?;
    assert_eq!(error["code"], "not_found");
    assert!(error["message"].as_str().is_some_and(|text| text.contains("nosuch")), "{error}");
    let info = error["details"]
        .as_array()
        .and_then(|details| details.iter().find(|detail| detail["type"] == "google.rpc.ErrorInfo"));
    assert_eq!(info.context("ErrorInfo")?["debug"]["reason"], "NOT_FOUND");

    for (body, named) in [
        (r#"{"parent": "sessions/x", "comand": {}}"#, "comand"),
        (r#"{"parent": "sessions/x", "command": {"argv": "ls"}}"#, "command.argv"),
        (r#"{"parent": "sessions/x""#, "request"),
    ] {
        let refused = caller.call("RunService/StartRun", "application/json", body).await?;
        let (status, error) = (refused.status, refused.json().await?);
        assert_eq!((status, &error["code"]), (400, &json!("invalid_argument")), "{error}");
        assert!(error["message"].as_str().is_some_and(|text| text.contains(named)), "{error}");
    }
    // A stream that cannot begin fails as other calls do.
    let refused =
        caller.json("RunService/WatchRun", &json!({ "name": "sessions/-/runs/x" })).await?;
    assert_eq!((refused.status, refused.header("content-type")), (400, "application/json"));
    cluster.end().await
}

#[tokio::test]
async fn connect_stream_ends_with_a_flag() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let run = caller.start(&client.session().await?.name, "echo streamed").await?;
    let watch = async |name: &str| {
        let body = prefixed(json!({ "name": name }).to_string().as_bytes());
        let response = caller.call("RunService/WatchRun", "application/connect+json", body).await?;
        assert_eq!(
            (response.status, response.header("content-type")),
            (200, "application/connect+json")
        );
        let messages = split(&response.bytes().await?).into_iter();
        messages
            .map(|(flags, json)| Ok((flags, serde_json::from_slice(&json)?)))
            .collect::<Result<Vec<(u8, Value)>>>()
    };
    let events = watch(&run).await?;
    assert_eq!(events.iter().map(|(_, event)| output(event)).collect::<String>(), "streamed\n");
    assert_eq!(events.last(), Some(&(2, json!({}))));
    assert!(events[..events.len() - 1].iter().all(|(flags, _)| *flags == 0), "{events:?}");

    let refused = watch("sessions/-/runs/x").await?;
    assert_eq!((refused.len(), refused[0].0), (1, 2));
    assert_eq!(refused[0].1["error"]["code"], "invalid_argument");
    cluster.end().await
}

#[tokio::test]
async fn connect_deadline_ends_a_call() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let run = caller.start(&client.session().await?.name, "sleep 60").await?;
    let request = http::Request::post("/codelia.v1.RunService/WatchRun")
        .header("content-type", "application/json")
        .header("connect-protocol-version", "1")
        .header("connect-timeout-ms", "300")
        .header("authorization", format!("Bearer {}", caller.secret))
        .body(json!({ "name": run }).to_string().into())?;
    let events = codelia_tests::Http1Response::to(&caller.address, request).await?.text().await?;
    let last: Value = serde_json::from_str(events.lines().last().context("a line")?)?;
    assert_eq!(last["error"]["code"], "deadline_exceeded", "{last}");
    caller.json("RunService/CancelRun", &json!({ "name": run })).await?;
    cluster.end().await
}
