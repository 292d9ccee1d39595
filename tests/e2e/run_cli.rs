//! Options of `codelia run` and what it prints, as a user at a terminal sees them.

use anyhow::{Context, Result};
use codelia_proto::v1::{CreateSessionRequest, ListRunsRequest, RunState};
use codelia_tests::{Client, Cluster, Process, ProcessOutput, Terminal, eventually};
use serde_json::Value;

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

/// Creates a session with the alias `work`.
async fn work(client: &Client) -> Result<()> {
    client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    Ok(())
}

/// Runs `codelia` on a terminal and returns what it showed and its exit code.
async fn on_terminal(
    cluster: &Cluster,
    client: &Client,
    arguments: &[&str],
) -> Result<(String, Option<i32>)> {
    let mut terminal = Terminal::start(&cluster.cli(client, arguments), 100, 30)?;
    let code = terminal.exited().await?.code();
    Ok((terminal.closed().await, code))
}

#[tokio::test]
async fn mistyped_option_is_not_run() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    work(&client).await?;
    for (arguments, meant) in [
        (vec!["run", "--timout", "5s", "--", "sleep", "1"], "--timeout"),
        (vec!["run", "-s", "work", "--retry=3", "true"], "--retries"),
        (vec!["exec", "--workdr", "src", "work", "true"], "--workdir"),
        (vec!["exec", "work", "--workdr", "src", "true"], "--workdir"),
    ] {
        let (shown, code) = on_terminal(&cluster, &client, &arguments).await?;
        assert!(shown.contains("a similar argument exists") && shown.contains(meant), "{shown}");
        assert!(!shown.contains("as a value"), "it does not suggest to run the option: {shown}");
        assert_eq!(code, Some(125), "not an exit code of the command");
    }
    let request = ListRunsRequest { parent: "sessions/-".into(), ..Default::default() };
    assert!(client.runs().list_runs(request).await?.into_inner().runs.is_empty());

    // After `--` everything is the command.
    let (shown, code) = on_terminal(&cluster, &client, &["run", "--", "--timout", "5s"]).await?;
    assert!(code == Some(127) && shown.contains("\"--timout\" not found"), "{shown}");
    let (shown, _) = on_terminal(&cluster, &client, &["run", "echo", "--timout"]).await?;
    assert_eq!(shown, "--timout\r\n");
    cluster.end().await
}

#[tokio::test]
async fn exit_codes_are_those_of_shells() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    work(&client).await?;
    let prepare = "echo > plain; printf 'no program' > noise; chmod +x noise; mkdir dir";
    codelia(&cluster, &client, &["exec", "work", "sh", "-c", prepare]).await?;
    for (program, code) in [
        ("no-such-program", 127),
        ("./missing", 127),
        ("./plain", 126),
        ("./dir", 126),
        ("./noise", 126),
    ] {
        let (shown, found) =
            on_terminal(&cluster, &client, &["exec", "work", "--", program]).await?;
        assert_eq!(found, Some(code), "{program}: {shown}");
        assert!(shown.starts_with("error: ") && shown.contains(&format!("{program:?}")), "{shown}");
        // The control: a shell reports the same.
        let script = format!("{program} 2>/dev/null; echo $?");
        let shell = codelia(&cluster, &client, &["exec", "work", "bash", "-c", &script]).await?;
        // A shell runs a script without `#!` itself.
        let expected = if program == "./noise" { 127 } else { code };
        assert_eq!(shell.stdout, format!("{expected}\n"), "{program}");
    }
    let done = codelia(&cluster, &client, &["run", "--json", "--", "no-such-program"]).await?;
    let record: Value = serde_json::from_str(&done.stdout)?;
    assert_eq!((done.code, &record["exitCode"]), (Some(127), &127.into()));
    cluster.end().await
}

#[tokio::test]
async fn json_record_is_alone_on_stdout() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let record = cluster.directory().join("record.json");
    let arguments = ["run", "--json", "-t", "--", "sh", "-c", "echo shown; exit 3"];
    let codelia = cluster.cli(&client, &arguments);
    let words: Vec<_> = std::iter::once(codelia.get_program()).chain(codelia.get_args()).collect();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "record=$1; shift; exec \"$@\" >\"$record\"", "sh"]).arg(&record).args(words);
    shell.env_clear().envs(codelia.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut terminal = Terminal::start(&shell, 80, 24)?;
    terminal.shows("shown").await?;
    assert_eq!(terminal.exited().await?.code(), Some(3));
    let text = std::fs::read_to_string(&record)?;
    assert_eq!(text.lines().count(), 1, "{text}");
    let record: Value = serde_json::from_str(&text)?;
    assert_eq!(record["exitCode"], 3);
    for duration in
        [&record["setupTime"], &record["usage"]["wallTime"], &record["usage"]["cpuTime"]]
    {
        assert!(duration.as_str().is_some_and(|duration| duration.ends_with('s')), "{record}");
    }
    for time in ["createTime", "startTime", "endTime"] {
        assert!(record[time].as_str().is_some_and(|time| time.contains('.')), "{time}: {record}");
    }
    cluster.end().await
}

#[tokio::test]
async fn lost_stdin_is_reported() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    work(&client).await?;
    let piped = |arguments: &'static [&str], input: &'static [u8]| {
        Process::finish(cluster.cli(&client, arguments), input)
    };
    let lost = piped(&["run", "-d", "-s", "work", "--", "sleep", "100"], b"data").await?;
    assert!(lost.code == Some(0) && lost.stderr.contains("does not read stdin"), "{lost:?}");
    assert!(lost.stderr.contains("codelia attach -i"), "the remedy: {lost:?}");
    let id = lost.stdout.trim();

    // On a terminal nothing is lost, so nothing is reported.
    let (shown, code) =
        on_terminal(&cluster, &client, &["run", "-d", "-s", "work", "--", "sleep", "100"]).await?;
    assert!(code == Some(0) && !shown.contains("stdin"), "{shown}");

    for (option, remedy) in [("-i", "codelia run -di"), ("-t", "codelia run -dt")] {
        let (shown, code) = on_terminal(&cluster, &client, &["attach", option, id]).await?;
        assert!(code == Some(125) && shown.contains(remedy), "{shown}");
    }
    // The remedy.
    let open = piped(&["run", "-di", "-s", "work", "--", "cat"], b"").await?;
    let sent =
        Process::finish(cluster.cli(&client, &["attach", "-i", open.stdout.trim()]), b"data")
            .await?;
    assert_eq!((sent.code, sent.stdout.as_str()), (Some(0), "data"));
    cluster.end().await
}

#[tokio::test]
async fn logs_print_stored_output() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    work(&client).await?;
    let script =
        "echo first; echo problem >&2; until [ -e go ]; do sleep 0.05; done; echo last; exit 4";
    let started =
        codelia(&cluster, &client, &["run", "-d", "-s", "work", "--", "sh", "-c", script]).await?;
    let id = started.stdout.trim();
    let logs = eventually("the first output is stored", || async {
        codelia(&cluster, &client, &["logs", id])
            .await
            .ok()
            .filter(|logs| logs.stderr == "problem\n")
    })
    .await;
    assert_eq!(
        (logs.code, logs.stdout.as_str()),
        (Some(0), "first\n"),
        "it does not wait for the end"
    );

    let mut following = Terminal::start(&cluster.cli(&client, &["logs", "-f", id]), 80, 24)?;
    following.shows("first\r\n").await?;
    codelia(&cluster, &client, &["exec", "work", "touch", "go"]).await?;
    following.shows("last\r\n").await?;
    assert_eq!(following.exited().await?.code(), Some(0), "not the exit code of the run");
    let logs = codelia(&cluster, &client, &["logs", id]).await?;
    assert_eq!((logs.stdout.as_str(), logs.stderr.as_str()), ("first\nlast\n", "problem\n"));
    cluster.end().await
}

#[tokio::test]
async fn kill_sends_a_signal() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    work(&client).await?;
    let script =
        "trap 'echo reloaded' HUP; trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done";
    let started =
        codelia(&cluster, &client, &["run", "-d", "-s", "work", "--", "sh", "-c", script]).await?;
    let id = started.stdout.trim();
    let mut attached = Terminal::start(&cluster.cli(&client, &["attach", id]), 80, 24)?;
    attached.shows("ready").await?;
    for (signal, shown) in [("HUP", Some("reloaded")), ("SIGUSR1", None)] {
        let sent = codelia(&cluster, &client, &["kill", "--signal", signal, id]).await?;
        assert_eq!((sent.code, sent.stdout.trim()), (Some(0), id), "{sent:?}");
        if let Some(shown) = shown {
            attached.shows(shown).await?;
        }
    }
    assert_eq!(attached.exited().await?.code(), Some(5), "it was not canceled");
    let late = codelia(&cluster, &client, &["kill", "--signal", "TERM", id]).await?;
    assert!(late.code == Some(1) && late.stderr.contains("RUN_NOT_RUNNING"), "{late:?}");
    let wrong = codelia(&cluster, &client, &["kill", "--signal", "TREM", id]).await?;
    assert!(wrong.code == Some(2) && wrong.stderr.contains("unknown signal"), "{wrong:?}");
    cluster.end().await
}

#[tokio::test]
async fn options_of_docker_are_accepted() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    work(&client).await?;
    codelia(&cluster, &client, &["exec", "work", "mkdir", "-p", "src/deep"]).await?;
    for directory in ["src/deep", "/workspace/src/deep"] {
        let pwd = codelia(&cluster, &client, &["exec", "-w", directory, "work", "pwd"]).await?;
        assert!(pwd.stdout.ends_with("/src/deep\n"), "{pwd:?}");
    }
    let file = cluster.directory().join("variables");
    std::fs::write(&file, "# comment\nFROM_FILE=2\n")?;
    let file = file.to_str().context("path")?;
    let arguments = ["exec", "-e", "NAME", "-e", "A=1", "--env-file", file, "work", "env"];
    let mut command = cluster.cli(&client, &arguments);
    command.env("NAME", "from this process");
    let env = Process::finish(command, b"").await?;
    for line in ["NAME=from this process", "A=1", "FROM_FILE=2"] {
        assert!(env.stdout.lines().any(|found| found == line), "{line}: {env:?}");
    }
    let arguments =
        ["run", "-d", "--memory", "96m", "--cpus", "0.5", "-s", "work", "--", "sleep", "100"];
    let started = codelia(&cluster, &client, &arguments).await?;
    let request = ListRunsRequest { parent: "sessions/-".into(), ..Default::default() };
    let runs = client.runs().list_runs(request).await?.into_inner().runs;
    let run =
        runs.into_iter().find(|run| run.run_id == started.stdout.trim()).context("the run")?;
    assert_ne!(run.state(), RunState::Ended);
    let limits = run.limits.context("limits")?;
    assert_eq!((limits.memory_bytes, limits.cpu_millicores), (Some(96 << 20), Some(500)));
    let (shown, code) =
        on_terminal(&cluster, &client, &["run", "--memory", "1t", "--", "true"]).await?;
    assert!(code == Some(125) && shown.contains("use b, k, m or g"), "{shown}");
    cluster.end().await
}
