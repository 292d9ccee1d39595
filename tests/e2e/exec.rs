//! `Exec`: input, signals, detach, and which runs end with their caller.

use std::collections::HashMap;

use anyhow::Result;
use codelia_proto::v1::{
    CommandSpec, RunState, StartRunRequest, WatchRunRequest,
    exec_request::Kind,
    outcome::Kind::{Canceled, Exited, Refused, Signaled},
};
use codelia_tests::{Client, Cluster, Exec, command, eventually, processes_working_in, shell};

/// Opens stdin for the command.
fn with_stdin(mut request: StartRunRequest) -> StartRunRequest {
    if let Some(command) = &mut request.command {
        command.stdin = true;
    }
    request
}

/// Waits until no process has its working directory in a session's directory.
pub(crate) async fn nothing_works_in(directory: &str) {
    eventually(("no process in", directory), || async {
        processes_working_in(directory.as_ref()).is_empty().then_some(())
    })
    .await;
}

/// Returns the first line of output, where `pwd` prints the session's directory.
pub(crate) async fn session_root(exec: &mut Exec) -> Result<String> {
    exec.until_stdout("\n").await?;
    Ok(exec.transcript.stdout_text().lines().next().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn streams_are_separate_and_exit_code_is_returned() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let seen = client.exec(&session.name, "printf out; printf err >&2; exit 7").await?;
    assert_eq!((seen.stdout_text().as_str(), seen.stderr_text().as_str()), ("out", "err"));
    assert_eq!(seen.outcome(), Exited(7));
    let run = seen.run();
    assert!(run.worker_id == "worker-0" && run.session_id == session.session_id);
    assert!(run.setup_time.is_some() && run.usage.is_some() && run.start_time.is_some());
    assert_eq!(
        run.receipt,
        Some(codelia_proto::v1::Receipt::default()),
        "the sandbox left something behind"
    );
    assert_eq!(run.output_bytes, 6);
    cluster.end().await
}

#[tokio::test]
async fn stdin_and_stdout_are_binary_safe() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let every_byte: Vec<u8> = (0..=255).cycle().take(200_000).collect();
    let exec = Exec::start(&client, with_stdin(command(&session.name, &["cat"]))).await?;
    for piece in every_byte.chunks(30_000) {
        exec.write(piece).await?;
    }
    exec.close_stdin().await?;
    let seen = exec.finish().await?;
    assert_eq!(seen.outcome(), Exited(0));
    assert!(seen.stdout == every_byte, "{} bytes returned", seen.stdout.len());
    cluster.end().await
}

#[tokio::test]
async fn command_gets_environment_directory_and_labels() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "mkdir -p deep/er").await?;
    let request = StartRunRequest {
        command: Some(CommandSpec {
            argv: ["sh", "-c", "echo $COLOUR; pwd; env"].map(String::from).to_vec(),
            env: HashMap::from([("COLOUR".to_owned(), "blue = red".to_owned())]),
            working_directory: "deep/er".to_owned(),
            ..CommandSpec::default()
        }),
        labels: HashMap::from([("team".to_owned(), "seven".to_owned())]),
        ..command(&session.name, &[])
    };
    let seen = Exec::start(&client, request).await?.finish().await?;
    let text = seen.stdout_text();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("blue = red"));
    assert!(lines.next().is_some_and(|line| line.ends_with("/deep/er")), "{text}");
    assert!(!text.contains("CODELIA_"), "the worker's environment leaked: {text}");
    assert_eq!(seen.run().labels.get("team").map(String::as_str), Some("seven"));
    cluster.end().await
}

#[tokio::test]
async fn command_that_cannot_start_is_refused_with_reason() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "echo text > plain").await?;
    for (argv, reason) in
        [("no-such-program", "EXECUTABLE_NOT_FOUND"), ("./plain", "EXECUTABLE_NOT_PERMITTED")]
    {
        let seen = Exec::start(&client, command(&session.name, &[argv])).await?.finish().await?;
        let Refused(refused) = seen.outcome() else { panic!("{argv}: {:?}", seen.outcome()) };
        assert_eq!(refused.reason, reason, "{argv}");
        assert!(!refused.message.is_empty() && seen.started.is_none());
    }
    cluster.end().await
}

#[tokio::test]
async fn signal_reaches_command_and_is_reported() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut caught = Exec::start(
        &client,
        shell(
            &session.name,
            "trap 'echo caught; exit 3' USR1; echo set; while :; do sleep 0.05; done",
        ),
    )
    .await?;
    caught.until_stdout("set").await?;
    caught.send(Kind::Signal(10)).await?;
    let seen = caught.finish().await?;
    assert!(seen.stdout_text().contains("caught"));
    assert_eq!(seen.outcome(), Exited(3));

    let mut killed = Exec::start(&client, shell(&session.name, "echo set; exec sleep 100")).await?;
    killed.until_stdout("set").await?;
    killed.send(Kind::Signal(15)).await?;
    assert_eq!(killed.finish().await?.outcome(), Signaled(15));
    cluster.end().await
}

#[tokio::test]
async fn exec_run_ends_with_its_caller() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut exec =
        Exec::start(&client, shell(&session.name, "pwd; sleep 100 & exec sleep 100")).await?;
    let directory = session_root(&mut exec).await?;
    let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    assert!(!processes_working_in(directory.as_ref()).is_empty());
    drop(exec);
    nothing_works_in(&directory).await;
    assert_eq!(
        client.watch_to_end(&name, 0).await?.outcome(),
        Canceled(codelia_proto::v1::Canceled::default())
    );
    cluster.end().await
}

#[tokio::test]
async fn detached_run_continues_and_can_be_reattached() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let request = with_stdin(shell(
        &session.name,
        "echo first; read line; echo got $line; read line; echo got $line",
    ));
    let mut exec = Exec::start(&client, request).await?;
    exec.until_stdout("first").await?;
    exec.detach().await?;
    // The answer to later input shows that the detach has arrived.
    exec.write("one\n").await?;
    exec.until_stdout("got one").await?;
    let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    drop(exec);

    let attach =
        Kind::Attach(WatchRunRequest { name: name.clone(), position: 0, ..Default::default() });
    let mut again = Exec::open(&client, attach, 0).await?;
    again.until_stdout("got one").await?;
    assert_eq!(client.get_run(&name).await?.state(), RunState::Running);
    again.write("two\n").await?;
    let seen = again.finish().await?;
    assert_eq!(seen.stdout_text(), "first\ngot one\ngot two\n");
    assert_eq!(seen.outcome(), Exited(0));
    cluster.end().await
}

#[tokio::test]
async fn run_survives_end_of_attached_call() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client
        .start(shell(&session.name, "echo up; until [ -e go ]; do sleep 0.05; done; echo done"))
        .await?;
    let attach =
        Kind::Attach(WatchRunRequest { name: run.name.clone(), position: 0, ..Default::default() });
    let mut exec = Exec::open(&client, attach, 0).await?;
    exec.until_stdout("up").await?;
    drop(exec);
    client.exec(&session.name, "touch go").await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("up\ndone\n", Exited(0)));
    cluster.end().await
}

#[tokio::test]
async fn started_run_survives_its_caller() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let leaving = Client::connect(&client.endpoint, &client.secret).await?;
    let run = leaving
        .start(shell(&session.name, "until [ -e go ]; do sleep 0.05; done; echo done"))
        .await?;
    drop(leaving);
    client.exec(&session.name, "touch go").await?;
    assert_eq!(client.watch_to_end(&run.name, 0).await?.stdout_text(), "done\n");
    cluster.end().await
}

#[tokio::test]
async fn background_processes_die_with_the_command() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    // In the background, in its own session, ignoring SIGTERM.
    let script =
        "pwd; (trap '' TERM HUP; setsid sleep 100 >/dev/null 2>&1 &) ; setsid sleep 100 & exit 0";
    let seen = client.exec(&session.name, script).await?;
    assert_eq!(seen.outcome(), Exited(0));
    nothing_works_in(seen.stdout_text().trim()).await;
    assert_eq!(seen.run().receipt, Some(codelia_proto::v1::Receipt::default()));
    cluster.end().await
}

#[tokio::test]
async fn exec_outlasts_owner_wait() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    // A worker waits ten seconds for the caller that owns a run.
    let seen = client.exec(&session.name, "sleep 11; echo late").await?;
    assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("late\n", Exited(0)));
    cluster.end().await
}
