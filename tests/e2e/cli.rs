//! The command line as a user calls it.

use std::process::Command;

use anyhow::Result;
use codelia_proto::v1::{CancelRunRequest, ListRunsRequest, RunState};
use codelia_tests::{Client, Cluster, Process, ProcessOutput, eventually};
use serde_json::Value;

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

#[tokio::test]
async fn run_passes_streams_and_exit_code() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let done =
        codelia(&cluster, &client, &["run", "--", "sh", "-c", "echo out; echo err >&2; exit 7"])
            .await?;
    assert_eq!(
        (done.stdout.as_str(), done.stderr.as_str(), done.code),
        ("out\n", "err\n", Some(7))
    );
    cluster.end().await
}

#[tokio::test]
async fn exit_codes_reflect_the_outcome() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    for (arguments, code) in [
        (vec!["run", "--", "true"], 0),
        (vec!["run", "--", "sh", "-c", "exit 255"], 255),
        (vec!["run", "--timeout", "200ms", "--", "sleep", "100"], 124),
        (vec!["run", "--", "no-such-program"], 127),
        (vec!["run", "--memory", "0", "--", "true"], 125),
        (vec!["run", "-s", "no-such-session", "--", "true"], 125),
        (vec!["run", "--", "sh", "-c", "kill -TERM $$"], 128 + 15),
        (vec!["run", "--", "sh", "-c", "kill -KILL $$"], 137),
    ] {
        let done = codelia(&cluster, &client, &arguments).await?;
        assert_eq!(done.code, Some(code), "{arguments:?}: {done:?}");
        assert!(code != 125 || !done.stderr.is_empty(), "errors have a message: {done:?}");
    }
    let invalid = client.with_secret(&format!("cdl_{}", "x".repeat(43)))?;
    assert_eq!(codelia(&cluster, &invalid, &["run", "--", "true"]).await?.code, Some(125));
    cluster.end().await
}

#[tokio::test]
async fn canceled_run_exits_with_130() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let running = Process::finish(cluster.cli(&client, &["run", "--", "sleep", "100"]), b"");
    let cancel = async {
        let run = eventually("the run is running", || async {
            let request = ListRunsRequest { parent: "sessions/-".into(), ..Default::default() };
            let runs = client.runs().list_runs(request).await.ok()?.into_inner().runs;
            runs.into_iter().find(|run| run.state() == RunState::Running)
        })
        .await;
        client.runs().cancel_run(CancelRunRequest { name: run.name, ..Default::default() }).await
    };
    let (done, canceled) = tokio::join!(running, cancel);
    canceled?;
    assert_eq!(done?.code, Some(130));
    cluster.end().await
}

#[tokio::test]
async fn json_output_is_only_the_run_record() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.operator().await?;
    let done = codelia(&cluster, &client, &["run", "--json", "--", "sh", "-c", "echo out; exit 3"])
        .await?;
    assert_eq!(done.code, Some(3));
    assert_eq!(done.stderr, "out\n");
    let record: Value = serde_json::from_str(&done.stdout)?;
    for key in ["runId", "sessionId", "workerId", "sandboxRoot", "setupTime", "usage", "receipt"] {
        assert!(record.get(key).is_some_and(|value| !value.is_null()), "{key} in {record}");
    }
    assert_eq!((&record["exitCode"], &record["outcome"]["exited"]), (&3.into(), &3.into()));
    assert_eq!(
        (&record["mode"], &record["isolation"]),
        (&"SANDBOX_MODE_LOGICAL".into(), &"none".into())
    );
    assert!(record["createTime"].as_str().is_some_and(|time| time.contains('.')), "{record}");
    cluster.end().await
}

#[tokio::test]
async fn stdin_passes_through() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let text = "line\n".repeat(50_000);
    let done =
        Process::finish(cluster.cli(&client, &["run", "--", "cat"]), text.as_bytes()).await?;
    assert_eq!((done.code, done.stdout.len()), (Some(0), text.len()));
    assert!(done.stdout == text);
    cluster.end().await
}

#[tokio::test]
async fn session_keeps_files_between_runs() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let run = |arguments: Vec<&'static str>| {
        let (cluster, client) = (&cluster, &client);
        async move { codelia(cluster, client, &arguments).await }
    };
    assert_eq!(run(vec!["session", "create", "--alias", "work"]).await?.code, Some(0));
    run(vec!["run", "-s", "work", "--", "sh", "-c", "echo kept > file"]).await?;
    assert_eq!(run(vec!["run", "-s", "work", "--", "cat", "file"]).await?.stdout, "kept\n");
    let shown = run(vec!["session", "show", "work", "--json"]).await?;
    let session: Value = serde_json::from_str(&shown.stdout)?;
    assert_eq!(session["alias"], "work");
    assert_eq!(run(vec!["session", "close", "work"]).await?.code, Some(0));
    assert_ne!(run(vec!["run", "-s", "work", "--", "true"]).await?.code, Some(0));
    cluster.end().await
}

#[tokio::test]
async fn detached_run_can_be_listed_attached_killed() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    client
        .create(codelia_proto::v1::CreateSessionRequest {
            alias: "work".into(),
            ..Default::default()
        })
        .await?;
    let script = "echo up; until [ -e go ]; do sleep 0.05; done; exit 5";
    let started =
        codelia(&cluster, &client, &["run", "-d", "-s", "work", "--", "sh", "-c", script]).await?;
    let id = started.stdout.trim().to_owned();
    assert_eq!(started.code, Some(0), "{started:?}");
    let listed = codelia(&cluster, &client, &["ps"]).await?;
    assert!(listed.stdout.contains(&id[..18]), "{listed:?}");
    codelia(&cluster, &client, &["run", "-s", "work", "--", "touch", "go"]).await?;
    let attached = codelia(&cluster, &client, &["attach", &id]).await?;
    assert_eq!((attached.stdout.as_str(), attached.code), ("up\n", Some(5)));

    let endless =
        codelia(&cluster, &client, &["run", "-d", "-s", "work", "--", "sleep", "100"]).await?;
    let id = endless.stdout.trim();
    assert_eq!(codelia(&cluster, &client, &["kill", id]).await?.code, Some(0));
    assert_eq!(codelia(&cluster, &client, &["attach", id]).await?.code, Some(130));
    cluster.end().await
}

#[tokio::test]
async fn cli_manages_tenants_keys_and_workers() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let made =
        codelia(&cluster, &operator, &["tenants", "create", "team-7", "--sessions", "3", "--json"])
            .await?;
    assert_eq!(made.code, Some(0), "{made:?}");
    let key = codelia(
        &cluster,
        &operator,
        &["keys", "create", "--tenant", "team-7", "--scope", "run", "--json"],
    )
    .await?;
    let key: Value = serde_json::from_str(&key.stdout)?;
    let member = operator.with_secret(key["secret"].as_str().unwrap_or_default())?;
    let below = codelia(&cluster, &member, &["run", "--", "true"]).await?;
    assert!(below.code != Some(0) && below.stderr.contains("codelia tenants floor"), "{below:?}");
    let floor = ["tenants", "floor", "team-7", "LEVEL_0", "--reason", "trusted", "--json"];
    let decided: Value = serde_json::from_str(&codelia(&cluster, &operator, &floor).await?.stdout)?;
    assert_eq!(decided["isolationFloor"]["level"], "ISOLATION_LEVEL_0", "{decided}");
    assert_eq!(codelia(&cluster, &member, &["run", "--", "true"]).await?.code, Some(0));
    let workers = codelia(&cluster, &operator, &["workers", "list", "--json"]).await?;
    let workers: Value = serde_json::from_str(&workers.stdout)?;
    assert_eq!(workers[0]["workerId"], "worker-0", "{workers}");
    assert_ne!(codelia(&cluster, &member, &["workers", "list"]).await?.code, Some(0));
    cluster.end().await
}

#[tokio::test]
async fn help_has_examples_and_completions_exist() -> Result<()> {
    let cluster = Cluster::start_with(codelia_tests::ClusterOptions {
        apis: 0,
        workers: 0,
        ..Default::default()
    })
    .await?;
    let call = |arguments: &[&str]| -> Result<Command> {
        let mut command = cluster.command(arguments[0], "help")?;
        command.args(&arguments[1..]);
        Ok(command)
    };
    for topic in ["--help", "up", "run", "attach", "ps", "kill"] {
        let arguments = if topic == "--help" { vec![topic] } else { vec![topic, "--help"] };
        let help = Process::finish(call(&arguments)?, b"").await?;
        assert!(help.code == Some(0) && help.stdout.contains("Example"), "{topic}: {help:?}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = Process::finish(call(&["completions", shell])?, b"").await?;
        assert!(script.code == Some(0) && script.stdout.contains("codelia"), "{shell}");
    }
    cluster.end().await
}
