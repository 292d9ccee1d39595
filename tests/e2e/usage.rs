//! What running runs use, and events of runs that get near their limits.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use codelia_proto::{
    duration_to_proto,
    v1::{
        CommandSpec, GetRunRequest, GetRunResponse, Limits, Policy, ResourcePolicy, RunState,
        StartRunRequest, outcome::Kind,
    },
};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Exec, Process, Scratch, eventually, recorded_events, refusal,
    shell,
};
use tonic::Code;

use crate::{
    secrets::{key_file, with_key},
    service::{free_address, http_get},
};

async fn get(client: &Client, name: &str) -> Result<GetRunResponse, tonic::Status> {
    let request =
        GetRunRequest { name: name.to_owned(), include_usage: true, ..Default::default() };
    Ok(client.runs().get_run(request).await?.into_inner())
}

/// A script that keeps its input open.
fn open(session: &str, script: &str) -> StartRunRequest {
    let request = shell(session, script);
    let command = request.command.map(|command| CommandSpec { stdin: true, ..command });
    StartRunRequest { command, ..request }
}

#[tokio::test]
async fn running_run_shows_what_it_uses() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { slots: 1, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script =
        "sleep 1000 & i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo begun; read x";
    let mut exec = Exec::start(&client, open(&session.name, script)).await?;
    exec.until("output", |seen| !seen.stdout.is_empty()).await?;
    let name = exec.transcript.queued.as_ref().context("queued")?.name.clone();

    let found = get(&client, &name).await?;
    let usage = found.live_usage.with_context(|| found.live_usage_unavailable.clone())?;
    assert_eq!((usage.processes, usage.output_bytes), (Some(2), 6), "{usage:?}");
    assert!(
        usage.memory_bytes > Some(0) && usage.peak_memory_bytes >= usage.memory_bytes,
        "{usage:?}"
    );
    let cpu_time = usage.cpu_time.context("CPU time")?;
    assert!(cpu_time.seconds > 0 || cpu_time.nanos > 1_000_000, "{usage:?}");
    let plain = GetRunRequest { name: name.clone(), ..Default::default() };
    let plain = client.runs().get_run(plain).await?.into_inner();
    assert!(
        plain.live_usage.is_none() && plain.live_usage_unavailable.is_empty(),
        "only on request"
    );

    let queued = client.start(shell(&session.name, "true")).await?;
    // A worker without a free slot hands it back.
    let is_queued = async || {
        let waits = get(&client, &queued.name).await.ok()?;
        (waits.live_usage.is_none() && waits.live_usage_unavailable.contains("queued"))
            .then_some(())
    };
    eventually("the run without a slot is queued", is_queued).await;

    let other = cluster.tenant("b").await?;
    assert_eq!(
        refusal(&get(&other, &name).await.expect_err("of another tenant")).code,
        Code::NotFound
    );

    let shown = Process::finish(cluster.cli(&client, &["ps", "--usage"]), b"").await?;
    ensure!(shown.code == Some(0) && shown.stdout.contains("PROCESSES"), "{shown:?}");
    let listed = Process::finish(cluster.cli(&client, &["ps", "--usage", "--json"]), b"").await?;
    let listed: serde_json::Value = serde_json::from_str(&listed.stdout)?;
    let usage = |state: &str| {
        let mut runs = listed.as_array().into_iter().flatten();
        runs.find(|found| found["run"]["state"] == state).map(|found| found["liveUsage"].clone())
    };
    assert_eq!(usage("RUN_STATE_RUNNING").context("the run")?["processes"], "2", "{listed}");
    assert!(usage("RUN_STATE_QUEUED").context("the waiting run")?.is_null(), "{listed}");

    exec.close_stdin().await?;
    exec.finish().await?;
    let ended = get(&client, &name).await?;
    assert!(
        ended.live_usage.is_none() && ended.live_usage_unavailable.contains("ended"),
        "{ended:?}"
    );
    assert!(ended.run.context("the run")?.usage.is_some());
    client.watch_to_end(&queued.name, 0).await?;
    cluster.end().await
}

#[tokio::test]
async fn processes_of_session_are_listed() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = with_key(&key_file(&scratch, "key")?);
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let start = async |request: StartRunRequest| {
        let mut exec = Exec::start(&client, request).await?;
        exec.until("output", |seen| !seen.stdout.is_empty()).await?;
        anyhow::Ok(exec)
    };
    let exec = start(open(&session.name, "sh -c 'sleep 1000; true' & echo begun; read x")).await?;
    let name = exec.transcript.queued.as_ref().context("queued")?.name.clone();
    let get = async |client: &Client| {
        let request =
            GetRunRequest { name: name.clone(), include_processes: true, ..Default::default() };
        client.runs().get_run(request).await
    };
    let found = eventually("the inner shell has started its command", || async {
        let found = get(&client).await.ok()?.into_inner();
        found.processes.iter().any(|process| process.command == "sleep 1000").then_some(found)
    })
    .await;
    assert!(found.live_usage.is_none() && found.processes_unavailable.is_empty(), "{found:?}");
    let sleep =
        found.processes.iter().find(|process| process.command == "sleep 1000").context("sleep")?;
    let parent = found.processes.iter().find(|process| process.pid == sleep.parent_pid);
    assert_eq!(parent.context("its parent")?.command, "sh -c sleep 1000; true", "{found:?}");
    let shell = found.processes.iter().find(|process| process.command.contains("begun"));
    assert_eq!(shell.context("the command")?.parent_pid, 0, "{found:?}");

    let other = cluster.tenant("b").await?;
    assert_eq!(refusal(&get(&other).await.expect_err("of another tenant")).code, Code::NotFound);
    let shown = Process::finish(cluster.cli(&client, &["ps", &session.session_id]), b"").await?;
    ensure!(shown.code == Some(0) && shown.stdout.contains("sleep 1000"), "{shown:?}");
    let foreign = Process::finish(cluster.cli(&other, &["ps", &session.session_id]), b"").await?;
    ensure!(foreign.code == Some(1) && !foreign.stdout.contains("sleep"), "{foreign:?}");

    let mut request = open(&session.name, "sleep $PASSWORD & echo begun; read x");
    if let Some(command) = &mut request.command {
        command.secret_env = [("PASSWORD".to_owned(), "1002".to_owned())].into();
    }
    let secret = start(request).await?;
    let listed = eventually("both runs are listed", || async {
        let listed = cluster.cli(&client, &["ps", &session.session_id, "--json"]);
        let listed = Process::finish(listed, b"").await.ok()?.stdout;
        (listed.contains("sleep 1000") && listed.contains("[sleep]")).then_some(listed)
    })
    .await;
    ensure!(!listed.contains("1002"), "a command line shows the secret: {listed}");

    // Ending the session ends its runs.
    let killed = Process::finish(cluster.cli(&client, &["kill", &session.session_id]), b"").await?;
    assert_eq!(
        (killed.code, killed.stdout.trim()),
        (Some(0), session.session_id.as_str()),
        "{killed:?}"
    );
    assert!(matches!(exec.finish().await?.outcome(), Kind::Canceled(_)));
    assert!(matches!(secret.finish().await?.outcome(), Kind::Canceled(_)));
    cluster.end().await
}

#[tokio::test]
async fn near_limits_are_reported_once_and_recorded() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let metrics = free_address().await?;
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &metrics)]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; printf %085d 0; read x";
    let limits = Limits { pids: Some(10), output_bytes: Some(100), ..Limits::default() };
    let request = StartRunRequest { limits: Some(limits), ..open(&session.name, script) };
    let mut exec = Exec::start(&client, request).await?;
    exec.until("both limits are near", |seen| seen.near_limits.len() == 2).await?;
    let name = exec.transcript.queued.as_ref().context("queued")?.name.clone();

    // Another caller gets them too.
    let mut watch = client.watch(&name, 0).await?;
    let mut seen = codelia_tests::Transcript::from_position(0);
    while seen.near_limits.len() < 2 {
        let event =
            codelia_tests::within("the next event", watch.message()).await?.context("an event")?;
        seen.push(event.event.unwrap_or_default());
    }
    exec.close_stdin().await?;
    let own = exec.finish().await?;
    for near_limits in [own.near_limits, seen.near_limits] {
        let mut near: Vec<_> =
            near_limits.iter().map(|near| (near.resource.as_str(), near.limit)).collect();
        near.sort_unstable();
        assert_eq!(near, [("output_bytes", 100), ("pids", 10)]);
    }
    let tenant = "a".parse()?;
    let events = recorded_events(&cluster.store, &tenant, Some(EventKind::LimitNear)).await?;
    let mut fields: Vec<_> =
        events.iter().filter_map(|event| event.body.field.as_deref()).collect();
    fields.sort_unstable();
    assert_eq!(fields, ["limits.output_bytes", "limits.pids"], "{events:?}");
    let page = http_get(&metrics, "/metrics").await?.1;
    for (resource, count) in
        [("pids", 1), ("output_bytes", 1), ("memory_bytes", 0), ("cpu_time", 0)]
    {
        let line = page.lines().find(|line| {
            line.starts_with("codelia_runs_near_limit_total{")
                && line.contains(&format!("\"{resource}\""))
        });
        assert!(
            line.is_some_and(|line| line.ends_with(&format!(" {count}"))),
            "{resource}: {line:?}"
        );
    }

    // The control: a run that stays below its limits.
    client.exec(&session.name, "echo fine").await?;
    let events = recorded_events(&cluster.store, &tenant, Some(EventKind::LimitNear)).await?;
    assert_eq!(events.len(), 2, "{events:?}");
    cluster.end().await
}

/// What a paced run uses would say what it does between two releases of its output.
#[tokio::test]
async fn paced_run_hides_usage_and_near_limits() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let release_interval = Some(duration_to_proto(Duration::from_millis(50)));
    let resources = Some(ResourcePolicy { release_interval, ..ResourcePolicy::default() });
    let policy = Some(Policy { resources, ..Policy::default() });
    let limits = Some(Limits { output_bytes: Some(100), ..Limits::default() });
    let request =
        StartRunRequest { policy, limits, ..open(&session.name, "printf %085d 0; read x; exit 3") };
    let mut exec = Exec::start(&client, request).await?;
    exec.until("output", |seen| seen.stdout.len() == 85).await?;
    let name = exec.transcript.queued.as_ref().context("queued")?.name.clone();
    let found = get(&client, &name).await?;
    assert_eq!(found.run.as_ref().map(codelia_proto::v1::Run::state), Some(RunState::Running));
    assert!(
        found.live_usage.is_none() && found.live_usage_unavailable.contains("release_interval"),
        "{found:?}"
    );
    exec.close_stdin().await?;
    let seen = exec.finish().await?;
    assert_eq!((seen.outcome(), seen.near_limits.len()), (Kind::Exited(3), 0));
    let events = eventually("the event is recorded", || async {
        let events =
            recorded_events(&cluster.store, &"a".parse().ok()?, Some(EventKind::LimitNear)).await;
        events.ok().filter(|events| !events.is_empty())
    })
    .await;
    assert_eq!(events.len(), 1, "{events:?}");
    cluster.end().await
}
