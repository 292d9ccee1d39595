//! HTTP/1.1 and JSON are held to the limits of gRPC.

use std::time::Duration;

use anyhow::{Context, Result};
use codelia_tests::{Cluster, ClusterOptions, eventually, within};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{interval, timeout},
};

use super::WebCaller;

const MIB: usize = 1024 * 1024;

async fn cluster_with(settings: &[(&'static str, &str)]) -> Result<Cluster> {
    let settings = settings.iter().map(|&(name, value)| (name, value.to_owned())).collect();
    Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await
}

/// Sends a byte every 50 ms until the server closes the connection, and returns what it answered.
async fn trickle(address: &str, head: &str, bytes: &str) -> Result<String> {
    let (mut reader, mut writer) = TcpStream::connect(address).await?.into_split();
    writer.write_all(head.as_bytes()).await?;
    let send = async {
        let mut tick = interval(Duration::from_millis(50));
        loop {
            tick.tick().await;
            if writer.write_all(bytes.as_bytes()).await.is_err() {
                break std::future::pending().await;
            }
        }
    };
    let mut answer = Vec::new();
    // A reset is as good as an orderly end.
    let receive = within("the server closes the connection", reader.read_to_end(&mut answer));
    tokio::select! { _ = receive => {}, () = send => {} }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn slow_http1_requests_are_ended() -> Result<()> {
    let cluster = cluster_with(&[
        ("CODELIA_API_FIRST_REQUEST_TIMEOUT", "1s"),
        ("CODELIA_API_IDLE_TIMEOUT", "1s"),
        ("CODELIA_API_MESSAGE_TIMEOUT", "1s"),
    ])
    .await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let parent = client.session().await?.name;
    let run = caller.start(&parent, "until [ -e go ]; do sleep 0.05; done").await?;
    // The control: a quiet call that has sent its request stays open all the time.
    let mut quiet = caller.json("RunService/WatchRun", &json!({ "name": run })).await?;
    while !quiet.line().await?.context("an event")?.contains("started") {}

    let head = "POST /codelia.v1.RunService/StartRun HTTP/1.1\r\nhost: x\r\n";
    assert_eq!(trickle(&caller.address, head, "x-a: b\r\n").await?, "", "a head without end");
    let second = "GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n";
    let answered = trickle(&caller.address, second, "x-a: b\r\n").await?;
    assert_eq!(
        answered.matches("HTTP/1.1 200").count(),
        1,
        "the second head has no end: {answered}"
    );

    let head = format!(
        "{head}authorization: Bearer {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 9999\r\n\r\n",
        caller.secret
    );
    let answer = trickle(&caller.address, &head, " ").await?;
    assert!(answer.starts_with("HTTP/1.1 409") && answer.contains("STREAM_STALLED"), "{answer}");

    client.exec(&parent, "touch go").await?;
    let mut last = Value::Null;
    while let Some(line) = quiet.line().await? {
        last = serde_json::from_str(&line)?;
    }
    assert!(last["event"]["finished"].is_object(), "{last}");
    cluster.end().await
}

#[tokio::test]
async fn json_is_held_to_the_limits_of_grpc() -> Result<()> {
    let cluster = cluster_with(&[
        ("CODELIA_API_MAX_CALLS_PER_KEY", "4"),
        ("CODELIA_API_MAX_WATCHES_PER_KEY", "2"),
        ("CODELIA_API_MAX_REQUEST_SIZE_PER_KEY", "6 MiB"),
        ("CODELIA_API_FAILED_KEYS_PER_MINUTE", "3"),
    ])
    .await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let parent = client.session().await?.name;
    let padded = |bytes: usize| format!(r#"{{"name": "{parent}"{}}}"#, " ".repeat(bytes));
    let get_session = async |body: String| {
        let answer = caller.call("SessionService/GetSession", "application/json", body).await?;
        anyhow::Ok((
            answer.status,
            answer.json().await?["message"].as_str().unwrap_or_default().to_owned(),
        ))
    };
    // The control: most of what a message may have.
    assert_eq!(get_session(padded(MIB / 2 - 200)).await?.0, 200);
    let (status, message) = get_session(padded(MIB / 2 + 200)).await?;
    assert!(status == 400 && message.contains("maximum is 524288 bytes"), "{status}: {message}");

    let body = json!({ "parent": parent, "command": { "argv": ["true", "x".repeat(7 * MIB)] } });
    let refused = caller.json("RunService/StartRun", &body).await?;
    let (status, error) = (refused.status, refused.text().await?);
    assert!(status == 429 && error.contains("max_request_size_per_key"), "{status}: {error}");

    let run = caller.start(&parent, "until [ -e go ]; do sleep 0.05; done").await?;
    let watch = || async { caller.json("RunService/WatchRun", &json!({ "name": run })).await };
    let held = [watch().await?, watch().await?];
    let refused = watch().await?;
    assert_eq!(refused.status, 429);
    assert!(refused.text().await?.contains("max_watches_per_key"));
    drop(held);
    eventually("closed connections free their calls", || async {
        (watch().await.ok()?.status == 200).then_some(())
    })
    .await;

    let mut last = String::new();
    for number in 0..10 {
        let stranger =
            WebCaller { secret: format!("cdl_{number:0>43}"), address: caller.address.clone() };
        last = stranger.json("SessionService/GetSession", &json!({})).await?.text().await?;
    }
    assert!(last.contains("TOO_MANY_FAILED_KEYS"), "{last}");
    assert_eq!(get_session(padded(0)).await?.0, 200, "a valid key still works");
    client.exec(&parent, "touch go").await?;
    cluster.end().await
}

/// Asks for the events of a run and reads nothing, with a small buffer for what arrives.
async fn stalled_watch(caller: &WebCaller, run: &str) -> Result<TcpStream> {
    let body = json!({ "name": run }).to_string();
    let head = format!(
        "POST /codelia.v1.RunService/WatchRun HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        caller.secret,
        body.len()
    );
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let mut stream = socket.connect(caller.address.parse()?).await?;
    stream.write_all(head.as_bytes()).await?;
    Ok(stream)
}

#[tokio::test]
async fn http1_caller_that_reads_nothing_is_closed() -> Result<()> {
    let cluster = cluster_with(&[
        ("CODELIA_API_IDLE_TIMEOUT", "1s"),
        ("CODELIA_API_MAX_WATCHES_PER_KEY", "1"),
    ])
    .await?;
    let client = cluster.tenant("a").await?;
    let caller = WebCaller::new(&cluster, &client);
    let run = caller.start(&client.session().await?.name, "head -c 9000000 /dev/zero").await?;
    // The control: a caller that reads gets everything.
    let mut reading = stalled_watch(&caller, &run).await?;
    let mut answer = Vec::new();
    within("all output", reading.read_to_end(&mut answer)).await?;
    assert!(
        answer.len() > 12_000_000 && answer.windows(8).any(|word| word == b"finished"),
        "{}",
        answer.len()
    );
    drop(reading);

    let stalled = stalled_watch(&caller, &run).await?;
    let watch = || async { caller.json("RunService/WatchRun", &json!({ "name": run })).await };
    eventually("the watch is open", || async { (watch().await.ok()?.status == 429).then_some(()) })
        .await;
    eventually("the watch has ended", || async {
        (watch().await.ok()?.status == 200).then_some(())
    })
    .await;
    drop(stalled);
    cluster.end().await
}

#[tokio::test]
async fn wrong_key_is_refused_before_the_body() -> Result<()> {
    let cluster = cluster_with(&[]).await?;
    let caller = WebCaller::new(&cluster, &cluster.tenant("a").await?);
    let send = async |secret: &str| {
        let head = format!(
            "POST /codelia.v1.RunService/StartRun HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\n\
             content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
        );
        let mut stream = TcpStream::connect(&caller.address).await?;
        stream.write_all(head.as_bytes()).await?;
        anyhow::Ok(stream)
    };
    let mut refused = send(&format!("cdl_{}", "x".repeat(43))).await?;
    let mut answer = [0; 12];
    within("the refusal", refused.read_exact(&mut answer)).await?;
    assert_eq!(String::from_utf8_lossy(&answer), "HTTP/1.1 401");
    // The control: with a valid key the server waits for the body.
    let mut waiting = send(&caller.secret).await?;
    assert!(timeout(Duration::from_secs(1), waiting.read_exact(&mut answer)).await.is_err());
    cluster.end().await
}
