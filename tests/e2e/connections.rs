//! What callers can hold open: connections, unfinished requests, calls, and wrong keys.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1::WatchRunRequest;
use codelia_store::Scope;
use codelia_tests::{
    Certificates, Client, Cluster, ClusterOptions, Http2, Process, Up, eventually, refusal, shell,
    within,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    net::{TcpSocket, TcpStream, UnixStream},
};
use tonic::{Code, transport::Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    output::proc_number,
    service::{free_address, http_get},
};

const MIB: u32 = 1024 * 1024;
const HEALTH: &str = "/grpc.health.v1.Health/Check";
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
const START_RUN: &str = "/codelia.v1.RunService/StartRun";
/// A run that ends when a file appears.
const WAITING: &str = "until [ -e go ]; do sleep 0.05; done";

fn with_settings(settings: &[(&'static str, &str)]) -> ClusterOptions {
    let settings = settings.iter().map(|&(name, value)| (name, value.to_owned())).collect();
    ClusterOptions { settings, ..ClusterOptions::default() }
}

/// Waits until the server closes a connection.
async fn closed(what: &str, mut stream: impl AsyncRead + Unpin) {
    let mut buffer = Vec::new();
    // A reset is as good as an orderly end.
    let _ = within(what, stream.read_to_end(&mut buffer)).await;
}

/// Connects from an address of this machine and sends nothing.
async fn silent_from(from: &str, to: &str) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((from.parse::<IpAddr>()?, 0).into())?;
    Ok(socket.connect(to.parse()?).await?)
}

/// A counter or gauge on a metrics page.
async fn metric(address: &str, name: &str) -> Result<u64> {
    let page = http_get(address, "/metrics").await?.1;
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(line.unwrap_or("0").parse()?)
}

async fn open_connections(address: &str, count: u64) {
    eventually(("open connections", count), || async {
        (metric(address, "codelia_connections").await.ok()? == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn unfinished_messages_without_key_hold_no_memory() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    client.session().await?;
    let api = cluster.apis[0].process.pid();
    let memory = || proc_number(api, "status", "VmRSS:");
    let attacker = Http2::connect("127.0.0.1", &cluster.apis[0].address).await?;
    let before = memory()?;
    for path in [HEALTH, REFLECTION] {
        let mut open = Vec::new();
        for _ in 0..200 {
            open.push(attacker.unfinished(path, None, 4 * MIB, 1 << 20).await?);
        }
        let grown = memory()?.saturating_sub(before);
        assert!(grown < 24 * 1024, "{path}: the api grew by {grown} kB");
    }
    let refused = attacker.unfinished(HEALTH, None, 4 * MIB, 1 << 20).await?.refused().await?;
    assert_eq!(
        (refused.code(), refusal(&refused).fields),
        (Code::InvalidArgument, vec!["request".to_owned()])
    );

    // The control: where so many bytes are allowed, the same measurement sees them.
    let mut open = Vec::new();
    for _ in 0..24 {
        let call =
            attacker.unfinished(START_RUN, Some(&client.secret), 4 * MIB, (4 << 20) - 1).await?;
        assert_eq!(call.sent, (4 << 20) - 1);
        open.push(call);
    }
    eventually("the api has the bytes", || async {
        (memory().ok()?.saturating_sub(before) > 64 * 1024).then_some(())
    })
    .await;
    drop(open);
    client.session().await?;
    cluster.end().await
}

#[tokio::test]
async fn wrong_key_is_refused_before_the_request_is_read() -> Result<()> {
    let cluster = Cluster::start().await?;
    let attacker = Http2::connect("127.0.0.1", &cluster.apis[0].address).await?;
    let wrong = format!("cdl_{}", "x".repeat(43));
    for secret in [None, Some(wrong.as_str())] {
        let call = attacker.unfinished(START_RUN, secret, 4 * MIB, 0).await?;
        assert_eq!(
            call.refused().await?.code(),
            Code::Unauthenticated,
            "nothing but the header was sent"
        );
    }
    // The control: with a valid key the server waits for the message.
    let secret = cluster.tenant("a").await?.secret;
    let call = attacker.unfinished(START_RUN, Some(&secret), 100, 50).await?;
    assert!(tokio::time::timeout(Duration::from_secs(1), call.refused()).await.is_err());
    cluster.end().await
}

#[tokio::test]
async fn unfinished_message_times_out() -> Result<()> {
    let cluster =
        Cluster::start_with(with_settings(&[("CODELIA_API_MESSAGE_TIMEOUT", "1s")])).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let caller = Http2::connect("127.0.0.1", &cluster.apis[0].address).await?;
    let mut cat = shell(&session.name, "cat");
    cat.command.get_or_insert_default().stdin = true;
    let quiet = codelia_tests::Exec::start(&client, cat).await?;
    for (path, secret) in [(HEALTH, None), (START_RUN, Some(client.secret.as_str()))] {
        let refused = caller.unfinished(path, secret, 100, 50).await?.refused().await?;
        assert_eq!(
            (refused.code(), refusal(&refused).reason.as_str()),
            (Code::Aborted, "STREAM_STALLED")
        );
    }
    // The control: a stream that is quiet between its messages stays open.
    quiet.write("still here").await?;
    quiet.close_stdin().await?;
    assert_eq!(quiet.finish().await?.stdout_text(), "still here");
    cluster.end().await
}

#[tokio::test]
async fn silent_connections_are_closed_on_every_port() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..Default::default() }).await?;
    let (metrics, worker_metrics) = (free_address().await?, free_address().await?);
    let authority = Certificates::new()?;
    authority.write(cluster.directory(), "api", &["localhost"])?;
    let path = |file: &str| cluster.directory().join(file).display().to_string();
    let (certificate, key) = (path("api.pem"), path("api.key"));
    let quick = [
        ("CODELIA_API_FIRST_REQUEST_TIMEOUT", "1s"),
        ("CODELIA_API_IDLE_TIMEOUT", "1s"),
        ("CODELIA_WORKER_FIRST_REQUEST_TIMEOUT", "1s"),
        ("CODELIA_WORKER_IDLE_TIMEOUT", "1s"),
        ("CODELIA_METRICS_REQUEST_TIMEOUT", "1s"),
    ];
    cluster
        .add_worker_with(&[&quick[..], &[("CODELIA_METRICS_LISTEN", &worker_metrics)]].concat())
        .await?;
    cluster.add_api_with(&[&quick[..], &[("CODELIA_METRICS_LISTEN", &metrics)]].concat()).await?;
    let tls = [("CODELIA_API_TLS_CERT", certificate.as_str()), ("CODELIA_API_TLS_KEY", &key)];
    cluster.add_api_with(&[&quick[..], &tls].concat()).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, WAITING)).await?;
    let mut watch = client.watch(&run.name, 0).await?;

    closed("api", silent_from("127.0.0.1", &cluster.apis[0].address).await?).await;
    closed("api with TLS", silent_from("127.0.0.1", &cluster.apis[1].address).await?).await;
    closed("metrics", silent_from("127.0.0.1", &metrics).await?).await;
    closed("metrics of the worker", silent_from("127.0.0.1", &worker_metrics).await?).await;
    let address = cluster.store.worker_list(None, 10).await?.remove(0).address;
    let socket = address.strip_prefix("unix:").context("a Unix socket")?;
    closed("worker", UnixStream::connect(socket).await?).await;

    // A client that finished its handshake and sends no request.
    let idle = Endpoint::from_shared(cluster.endpoint(0))?.connect().await?;
    // Only the connection of the watch is left, which is quiet and was open all the time.
    open_connections(&metrics, 1).await;
    HealthClient::new(idle)
        .check(HealthCheckRequest::default())
        .await
        .context("it connects again")?;
    client.exec(&session.name, "touch go").await?;
    let mut finished = false;
    while let Some(message) = within("the next event", watch.message()).await? {
        finished |= format!("{message:?}").contains("Finished");
    }
    assert!(finished, "the control: the open watch saw the end of its run");
    drop((watch, client));
    open_connections(&metrics, 0).await;
    cluster.end().await
}

#[tokio::test]
async fn connections_above_the_cap_are_refused() -> Result<()> {
    let metrics = free_address().await?;
    let mut cluster = Cluster::start_with(ClusterOptions { apis: 0, ..Default::default() }).await?;
    cluster
        .add_api_with(&[
            ("CODELIA_API_MAX_CONNECTIONS", "8"),
            ("CODELIA_API_MAX_CONNECTIONS_PER_ADDRESS", "6"),
            ("CODELIA_METRICS_LISTEN", &metrics),
        ])
        .await?;
    let address = cluster.apis[0].address.clone();
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(Http2::connect("127.0.0.1", &address).await?);
    }
    closed("the seventh of one address", silent_from("127.0.0.1", &address).await?).await;
    held.push(Http2::connect("127.0.0.2", &address).await.context("another address")?);
    held.push(Http2::connect("127.0.0.2", &address).await.context("another address")?);
    closed("the ninth of all", silent_from("127.0.0.3", &address).await?).await;
    assert_eq!(client.exec(&session.name, "echo works").await?.stdout_text(), "works\n");
    for cap in ["max_connections", "max_connections_per_address"] {
        let name = format!("codelia_connections_refused_total{{cap=\"{cap}\"}}");
        assert_eq!(metric(&metrics, &name).await?, 1, "{cap}");
    }
    // The control: the places are free again.
    drop(held);
    open_connections(&metrics, 1).await;
    assert!(
        Client::connect(&cluster.endpoint(0), &client.secret)
            .await?
            .get_session(&session.name)
            .await
            .is_ok()
    );
    cluster.end().await
}

#[tokio::test]
async fn idle_connections_leave_descriptors_for_commands() -> Result<()> {
    const OPEN_FILES: u64 = 1024;
    setrlimit(Resource::Nofile, Rlimit { current: Some(8192), ..getrlimit(Resource::Nofile) })
        .context("this test opens many connections")?;
    let place = Up::new()?;
    let mut command = place.up_command();
    command.args(["--mode", "logical"]).env("CODELIA_API_FIRST_REQUEST_TIMEOUT", "600s");
    let limited = Process::limit_open_files(&command, OPEN_FILES);
    let mut up = Process::start("up", limited, place.directory())?;
    let ready = up.ready().await?;
    let endpoint = ready.split_whitespace().nth(1).context("the endpoint")?.to_owned();
    let address = endpoint.trim_start_matches("http://").to_owned();
    let text = std::fs::read_to_string(place.data().join("client.toml"))?;
    let secret = text.split('"').find(|word| word.starts_with("cdl_")).context("the key")?;
    let client = Client::connect(&endpoint, secret).await?;
    let session = client.session().await?;
    client.exec(&session.name, "true").await?;

    let mut idle = Vec::new();
    for _ in 0..1000 {
        idle.push(silent_from("127.0.0.1", &address).await?);
    }
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", up.pid())).map(Iterator::count);
    eventually("the connections that are not refused are held", || async {
        (descriptors().ok()? > 256).then_some(())
    })
    .await;
    for number in 0..20 {
        let seen = client.exec(&session.name, &format!("echo {number}; ulimit -n")).await?;
        assert_eq!(seen.stdout_text(), format!("{number}\n1024\n"));
    }
    let other =
        Http2::connect("127.0.0.2", &address).await.context("another address can connect")?;
    let held = u64::try_from(descriptors()?)?;
    assert!(held < OPEN_FILES * 3 / 4, "{held} descriptors are open");
    drop((idle, other));

    let next = eventually("a new client can connect", || async {
        Client::connect(&endpoint, secret).await.ok()
    })
    .await;
    assert_eq!(next.exec(&session.name, "echo recovered").await?.stdout_text(), "recovered\n");
    let log = up.read_log();
    assert!(
        !log.contains("left something behind") && !log.contains("no free descriptors"),
        "{log}"
    );
    up.terminate().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn commands_do_not_inherit_the_raised_limit() -> Result<()> {
    let cluster = Cluster::start().await?;
    let limits =
        std::fs::read_to_string(format!("/proc/{}/limits", cluster.workers[0].process.pid()))?;
    let line =
        limits.lines().find(|line| line.starts_with("Max open files")).context("the limit")?;
    let [soft, hard] = [3, 4].map(|at| line.split_whitespace().nth(at).unwrap_or_default());
    let raised = hard.parse::<u64>().unwrap_or(u64::MAX).min(1 << 20);
    assert_eq!(soft.parse::<u64>()?, raised, "the worker raised its limit: {line}");
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    assert_eq!(
        client.exec(&session.name, "ulimit -n; ulimit -Hn").await?.stdout_text(),
        "1024\n1024\n"
    );
    cluster.end().await
}

#[tokio::test]
async fn open_calls_of_a_key_are_limited() -> Result<()> {
    let limits = [
        ("CODELIA_API_MAX_CALLS_PER_KEY", "5"),
        ("CODELIA_API_MAX_WATCHES_PER_KEY", "3"),
        ("CODELIA_API_MAX_REQUEST_SIZE_PER_KEY", "9 MiB"),
    ];
    let cluster = Cluster::start_with(with_settings(&limits)).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, WAITING)).await?;
    let mut watches = Vec::new();
    for _ in 0..3 {
        watches.push(client.watch(&run.name, 0).await?);
    }
    let refused = refusal(&client.watch(&run.name, 0).await.expect_err("a fourth watch"));
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::ResourceExhausted, "TOO_MANY_CALLS")
    );
    assert!(refused.retry_after.is_some());

    let caller = Http2::connect("127.0.0.1", &cluster.apis[0].address).await?;
    // More than the window of a stream: the server has begun to read.
    let unfinished = || caller.unfinished(START_RUN, Some(&client.secret), 4 * MIB, 1 << 20);
    let (first, second) = (unfinished().await?, unfinished().await?);
    let refused = refusal(&client.get_run(&run.name).await.expect_err("a sixth call"));
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::ResourceExhausted, "TOO_MANY_CALLS")
    );
    watches.truncate(1);
    eventually("calls are possible again", || async { client.get_run(&run.name).await.ok() }).await;
    let refused = unfinished().await?.refused().await?;
    assert_eq!(
        (refused.code(), refusal(&refused).reason.as_str()),
        (Code::ResourceExhausted, "TOO_MANY_CALLS")
    );
    assert!(refused.message().contains("max_request_size_per_key"), "{refused}");

    // The control: another key of the tenant has its own limits.
    let other = client.with_secret(&cluster.key("a", &[Scope::Run]).await?)?;
    other
        .runs()
        .watch_run(WatchRunRequest { name: run.name.clone(), position: 0, ..Default::default() })
        .await?;
    drop((first, second, watches));
    client.exec(&session.name, "touch go").await?;
    cluster.end().await
}

/// Counts the key lookups that `count` wrong keys cost, and how they are refused.
async fn try_wrong_keys(
    client: &Client,
    metrics: &str,
    count: usize,
) -> Result<(u64, Vec<String>)> {
    let before = metric(metrics, "codelia_key_lookups_total").await?;
    let mut reasons = Vec::new();
    for number in 0..count {
        let wrong = client.with_secret(&format!("cdl_{number:0>43}"))?;
        reasons
            .push(refusal(&wrong.get_session("sessions/x").await.expect_err("a wrong key")).reason);
    }
    Ok((metric(metrics, "codelia_key_lookups_total").await? - before, reasons))
}

#[tokio::test]
async fn wrong_keys_cost_few_queries() -> Result<()> {
    let mut cluster = Cluster::start_with(ClusterOptions { apis: 0, ..Default::default() }).await?;
    let (metrics, unlimited) = (free_address().await?, free_address().await?);
    for (metrics, limit) in [(&metrics, "5"), (&unlimited, "0")] {
        let limit = ("CODELIA_API_FAILED_KEYS_PER_MINUTE", limit);
        cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", metrics), limit]).await?;
    }
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;

    let (lookups, reasons) = try_wrong_keys(&client, &metrics, 200).await?;
    // A few tokens come back while the test runs.
    assert!((5..50).contains(&lookups), "200 wrong keys cost {lookups} lookups");
    assert_eq!(reasons[0], "KEY_INVALID");
    assert_eq!(reasons.last().map(String::as_str), Some("TOO_MANY_FAILED_KEYS"));
    let repeated = client.with_secret(&format!("cdl_{:0>43}", 0))?;
    let refused = repeated.get_session(&session.name).await.expect_err("a wrong key");
    assert_eq!(refusal(&refused).reason, "KEY_INVALID", "a remembered key costs no token");
    client.get_session(&session.name).await.context("a key that was valid before still works")?;

    // The control: without the limit every key costs a lookup.
    let other = Client::connect(&cluster.endpoint(1), &client.secret).await?;
    assert_eq!(try_wrong_keys(&other, &unlimited, 200).await?.0, 200);
    cluster.end().await
}

#[tokio::test]
async fn many_calls_with_a_new_key_are_admitted() -> Result<()> {
    let settings = with_settings(&[("CODELIA_API_FAILED_KEYS_PER_MINUTE", "5")]);
    let cluster = Cluster::start_with(settings).await?;
    let client = cluster.tenant("a").await?;
    let calls = (0..50).map(|_| client.get_session("sessions/x"));
    for answer in futures::future::join_all(calls).await {
        assert_eq!(answer.expect_err("no such session").code(), Code::NotFound);
    }
    let wrong = client.with_secret(&format!("cdl_{:0>43}", 0))?;
    let refused = wrong.get_session("sessions/x").await.expect_err("a wrong key");
    assert_eq!(refusal(&refused).reason, "KEY_INVALID", "all tokens are left");
    cluster.end().await
}
