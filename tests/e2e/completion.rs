//! Completion of names in a shell.

use std::{fs, net::TcpListener, process::Command};

use anyhow::{Context, Result};
use codelia_proto::v1::CreateSessionRequest;
use codelia_tests::{Cluster, Process, Program, Terminal};

#[tokio::test]
async fn bash_completes_sessions_and_files() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    client
        .exec(&session.name, "mkdir src; echo content-$((40+2)) > src/main.c; touch 'src/m$(id)'")
        .await?;
    let script = Process::finish(cluster.cli(&client, &["completions", "bash"]), b"").await?.stdout;
    let file = cluster.directory().join("codelia.bash");
    // The system's own settings would replace a prompt in the environment.
    fs::write(&file, format!("{script}\nPS1='prompt> '\n"))?;
    let program = Program::find()?;
    let directory = program.path().parent().context("a directory")?;
    let client_command = cluster.cli(&client, &[]);
    let mut shell = Command::new("bash");
    shell.args(["--noprofile", "--rcfile"]).arg(&file).arg("-i");
    shell.envs(client_command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let path = std::env::var("PATH")?;
    shell.env("PATH", format!("{}:{path}", directory.display()));
    let mut terminal = Terminal::start(&shell, 200, 50)?;
    terminal.shows("prompt> ").await?;
    terminal.type_text("codelia sess\tsho\two\t")?;
    terminal.shows("codelia session show work ").await?;
    terminal.type_text("\r")?;
    terminal.shows(&session.session_id).await?;
    // A name with shell syntax is not offered, so this one is the only candidate.
    terminal.type_text("codelia cat wo\tsr\tm\t")?;
    terminal.shows("codelia cat work:src/main.c ").await?;
    terminal.type_text("\r")?;
    terminal.shows("content-42").await?;
    terminal.type_text("exit\r")?;
    terminal.exited().await?;
    cluster.end().await
}

#[tokio::test]
async fn completion_is_silent_if_the_server_fails() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    let complete = async |endpoint: &str| {
        let mut command = cluster.cli(&client, &["__complete", "--", "session", "show", "w"]);
        command.env("CODELIA_ENDPOINT", endpoint);
        Process::finish(command, b"").await
    };
    assert_eq!(complete(&client.endpoint).await?.stdout, "work\n", "the control");
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    // Connections to it are accepted by the kernel and never answered.
    let mute = TcpListener::bind("127.0.0.1:0")?;
    for endpoint in [
        format!("http://{closed}"),
        format!("http://{}", mute.local_addr()?),
        "nonsense".to_owned(),
    ] {
        let done = complete(&endpoint).await?;
        assert_eq!(
            (done.code, done.stdout.as_str(), done.stderr.as_str()),
            (Some(0), "", ""),
            "{endpoint}"
        );
    }
    cluster.end().await
}
