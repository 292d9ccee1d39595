//! Health, metrics, deadlines, logs and orderly shutdown.

use std::{collections::BTreeSet, fs::File, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1::{RunState, WatchRunRequest, outcome::Kind::Exited};
use codelia_tests::{
    Client, Cluster, Exec, all_methods, available, eventually, is_root, refusal, shell, within,
};
use rustix::{
    fs::{IFlags, ioctl_setflags},
    process::Signal,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tonic::{Code, Request};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

/// Fetches a page over HTTP.
pub(crate) async fn http_get(address: &str, path: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(
            format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes(),
        )
        .await?;
    let mut answer = String::new();
    within("the page", stream.read_to_string(&mut answer)).await?;
    let status = answer.split(' ').nth(1).context("a status")?.parse()?;
    Ok((status, answer))
}

/// Returns an address with an unused port.
pub(crate) async fn free_address() -> Result<String> {
    Ok(tokio::net::TcpListener::bind("127.0.0.1:0").await?.local_addr()?.to_string())
}

#[tokio::test]
async fn health_lists_every_service_without_a_key() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let mut health = HealthClient::new(client.channel());
    let methods = all_methods()?;
    let services: BTreeSet<_> =
        methods.iter().map(|method| method.parent_service().full_name().to_owned()).collect();
    assert!(services.len() > 4, "{services:?}");
    for service in std::iter::once(String::new()).chain(services) {
        eventually(("serving", service.clone()), || {
            let (mut health, service) = (health.clone(), service.clone());
            async move {
                let answer = health.check(HealthCheckRequest { service }).await.ok()?.into_inner();
                (answer.status() == ServingStatus::Serving).then_some(())
            }
        })
        .await;
    }
    let unknown = health.check(HealthCheckRequest { service: "no.such.Service".into() }).await;
    assert_eq!(unknown.expect_err("unknown").code(), Code::NotFound);
    cluster.end().await
}

#[tokio::test]
async fn deadline_ends_watch_but_not_the_run() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, "exec sleep 100")).await?;
    let mut request =
        Request::new(WatchRunRequest { name: run.name.clone(), position: 0, ..Default::default() });
    request.set_timeout(Duration::from_millis(500));
    let mut stream = client.runs().watch_run(request).await?.into_inner();
    let status = loop {
        match within("the end of the watch", stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the watch ended without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!(refusal(&status).code, Code::DeadlineExceeded);
    assert_eq!(client.get_run(&run.name).await?.state(), RunState::Running);
    cluster.end().await
}

#[tokio::test]
async fn metrics_have_documented_names() -> Result<()> {
    let mut cluster = Cluster::start_with(codelia_tests::ClusterOptions {
        apis: 0,
        workers: 0,
        ..Default::default()
    })
    .await?;
    let (of_api, of_worker) = (free_address().await?, free_address().await?);
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &of_worker)]).await?;
    cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", &of_api)]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "exit 3").await?;
    client.get_run("sessions/-/runs/nonsense").await.expect_err("malformed");
    client.close(&session.name).await?;

    for address in [&of_api, &of_worker] {
        assert_eq!(http_get(address, "/healthz").await?.0, 200);
        assert_eq!(http_get(address, "/readyz").await?.0, 200);
    }
    let api = http_get(&of_api, "/metrics").await?.1;
    for wanted in [
        "codelia_requests_total{",
        "code=\"INVALID_ARGUMENT\"",
        "codelia_request_seconds_bucket{",
        "codelia_refusals_total{",
        "step=\"admit\"",
        "step=\"record\"",
        "step=\"dispatch\"",
        "codelia_queue_depth ",
    ] {
        assert!(api.contains(wanted), "{wanted} is missing in:\n{api}");
    }
    let worker = eventually("the removal is counted", || async {
        let page = http_get(&of_worker, "/metrics").await.ok()?.1;
        page.contains("codelia_session_directories_removed_total").then_some(page)
    })
    .await;
    for wanted in [
        "codelia_runs_total{",
        "codelia_run_cpu_seconds_total{",
        "codelia_run_read_bytes_total{",
        "codelia_run_written_bytes_total{",
        "outcome=\"exited\"",
        "mode=\"logical\"",
        "codelia_isolation_setup_seconds_bucket{",
        "step=\"setup\"",
        "step=\"execute\"",
        "step=\"commit\"",
        "codelia_slots ",
        "codelia_slots_busy ",
        "codelia_leases ",
    ] {
        assert!(worker.contains(wanted), "{wanted} is missing in:\n{worker}");
    }
    cluster.end().await
}

#[tokio::test]
async fn stuck_directory_is_reported_and_retried() -> Result<()> {
    if !available("root", (!is_root()).then_some("only root can make a directory immutable")) {
        return Ok(());
    }
    let mut cluster =
        Cluster::start_with(codelia_tests::ClusterOptions { workers: 0, ..Default::default() })
            .await?;
    let metrics = free_address().await?;
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &metrics)]).await?;
    let shows = |line: &'static str| {
        let metrics = metrics.clone();
        async move { http_get(&metrics, "/metrics").await.ok()?.1.contains(line).then_some(()) }
    };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let trash = File::open(cluster.workers[0].root.join("trash"))?;
    ioctl_setflags(&trash, IFlags::IMMUTABLE)?;
    client.close(&session.name).await?;
    eventually("the metric shows it", || shows("codelia_session_directories_stuck 1")).await;
    assert_eq!(cluster.session_directories()?.len(), 1);
    ioctl_setflags(&trash, IFlags::empty())?;
    eventually("the directory is removed", || async {
        cluster.session_directories().ok()?.is_empty().then_some(())
    })
    .await;
    eventually("the metric is cleared", || shows("codelia_session_directories_stuck 0")).await;
    cluster.end().await
}

#[tokio::test]
async fn stopping_api_finishes_calls_and_accepts_none() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "pwd; until [ -e go ]; do sleep 0.05; done; echo done";
    let mut exec = Exec::start(&client, shell(&session.name, script)).await?;
    let root = crate::exec::session_root(&mut exec).await?;
    cluster.apis[0].process.signal(Signal::TERM)?;
    eventually("the api accepts no connections", || async {
        Client::connect(&client.endpoint, &client.secret).await.is_err().then_some(())
    })
    .await;
    std::fs::write(format!("{root}/go"), "")?;
    let seen = exec.finish().await?;
    assert!(seen.stdout_text().ends_with("\ndone\n"));
    assert_eq!(seen.outcome(), Exited(0));
    drop(client);
    assert!(cluster.apis[0].process.exited().await?.success());
    cluster.end().await
}

#[tokio::test]
async fn logs_are_json_and_hide_keys() -> Result<()> {
    let mut cluster = Cluster::start_with(codelia_tests::ClusterOptions {
        settings: vec![
            ("CODELIA_LOG_FORMAT", "json".into()),
            ("CODELIA_LOG_FILTER", "debug".into()),
        ],
        ..Default::default()
    })
    .await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.exec(&session.name, "true").await?.run().run_id.clone();
    cluster.apis[0].process.terminate().await?;
    cluster.workers[0].process.terminate().await?;
    let (api, worker) = (cluster.apis[0].process.read_log(), cluster.workers[0].process.read_log());
    for line in api.lines().chain(worker.lines()) {
        serde_json::from_str::<serde_json::Value>(line)
            .with_context(|| format!("not JSON: {line}"))?;
    }
    let names = |log: &str, id: &str| assert!(log.contains(id), "{id} is missing in:\n{log}");
    names(&worker, &format!("\"run\":\"{run}\""));
    names(&worker, &format!("\"session\":\"{}\"", session.session_id));
    names(&worker, "\"tenant\":\"a\"");
    names(&api, "\"tenant\":\"a\"");
    names(&api, "\"request_id\":\"");
    assert!(!api.contains(&client.secret) && !worker.contains(&client.secret));
    cluster.end().await
}
