//! The terminal of a run: its device in the sandbox, detaching and attaching again.

use anyhow::{Context, Result};
use codelia_tests::{Client, Cluster, Process, Terminal};

use crate::isolation::isolating;

const SHELL: [&str; 3] = ["bash", "--norc", "--noprofile"];
const CTRL_P_CTRL_Q: &str = "\u{10}\u{11}";

/// Starts `codelia` with these arguments on a terminal of 91 columns and 37 rows.
fn on_terminal(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<Terminal> {
    Terminal::start(&cluster.cli(client, arguments), 91, 37)
}

/// Waits for the message that the run continues. Returns the run's id.
async fn detached(terminal: &mut Terminal) -> Result<String> {
    let shown = terminal.shows("stop with `codelia kill").await?;
    assert_eq!(terminal.exited().await?.code(), Some(0), "{shown}");
    let (_, rest) =
        shown.split_once("reattach with `codelia attach -t ").context("how to attach again")?;
    Ok(rest.split('`').next().unwrap_or_default().to_owned())
}

/// Ends the shell on a terminal of a run and requires its exit code.
async fn exit(mut terminal: Terminal, code: i32) -> Result<()> {
    terminal.type_text(&format!("exit {code}\r"))?;
    assert_eq!(terminal.exited().await?.code(), Some(code));
    Ok(())
}

async fn terminal_is_a_device_of_the_sandbox(cluster: &Cluster) -> Result<()> {
    let client = cluster.tenant("a").await?;
    let mut terminal = on_terminal(cluster, &client, &[&["run", "-t", "--"], &SHELL[..]].concat())?;
    terminal.shows("bash-").await?;
    terminal.type_text("test -c \"$(tty)\" && echo \"device-$(tty)-$((20+1))\"\r")?;
    terminal.shows("device-/dev/pts/0-21").await?;
    terminal.type_text("perl -MPOSIX -e 'print ttyname(0), qq(-named\\n)'\r")?;
    terminal.shows("/dev/pts/0-named").await?;

    // Job control: a background job stops when it reads, continues in the foreground, and is
    // interrupted there.
    terminal.type_text("cat & sleep 0.1; wait; jobs; echo stopped-$((20+2))\r")?;
    assert!(terminal.shows("stopped-22").await?.contains("Stopped"), "{}", terminal.shown());
    terminal.type_text("fg\r")?;
    terminal.shows("\rcat\r\n").await?;
    terminal.type_text("typed-line\r")?;
    terminal.shows("typed-line\r\ntyped-line\r\n").await?;
    terminal.type_text("\u{3}")?;
    terminal.shows("^C\r\n").await?;
    terminal.resize(132, 50)?;
    terminal.type_text(
        "until [ \"$(stty size)\" = '50 132' ]; do sleep 0.05; done; echo size-$((20+3))\r",
    )?;
    terminal.shows("size-23").await?;
    exit(terminal, 9).await
}

#[tokio::test]
async fn tty_names_a_device_in_bwrap() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    terminal_is_a_device_of_the_sandbox(&cluster).await?;
    cluster.end().await
}

#[tokio::test]
async fn tty_names_a_device_in_nsjail() -> Result<()> {
    let Some(cluster) = isolating("nsjail", 1).await? else { return Ok(()) };
    terminal_is_a_device_of_the_sandbox(&cluster).await?;
    cluster.end().await
}

#[tokio::test]
async fn tty_names_a_device_in_native() -> Result<()> {
    let Some(cluster) = isolating("native", 1).await? else { return Ok(()) };
    terminal_is_a_device_of_the_sandbox(&cluster).await?;
    cluster.end().await
}

#[tokio::test]
async fn tty_names_a_device_in_container() -> Result<()> {
    let Some(cluster) = isolating("container", 1).await? else { return Ok(()) };
    terminal_is_a_device_of_the_sandbox(&cluster).await?;
    cluster.end().await
}

#[tokio::test]
async fn user_detaches_and_attaches_again() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let mut first = on_terminal(&cluster, &client, &[&["run", "-t", "--"], &SHELL[..]].concat())?;
    first.shows("bash-").await?;
    // A control-P alone reaches the shell, which repeats the last command.
    first.type_text("kept=$((20+1)); echo kept-$kept\r")?;
    first.shows("kept-21").await?;
    first.type_text("echo once-$((20+2))\r")?;
    first.shows("once-22").await?;
    first.type_text("\u{10}; echo twice-$((20+3))\r")?;
    assert_eq!(first.shows("twice-23").await?.matches("once-22").count(), 2, "{}", first.shown());
    first.type_text(CTRL_P_CTRL_Q)?;
    let id = detached(&mut first).await?;

    // It runs on, keeps its state, and takes the size of the new terminal.
    let mut second = Terminal::start(&cluster.cli(&client, &["attach", "-t", &id]), 70, 20)?;
    second.shows("once-22").await?;
    second.type_text(
        "until [ \"$(stty size)\" = '20 70' ]; do sleep 0.05; done; echo again-$kept\r",
    )?;
    second.shows("again-21").await?;
    second.type_text(CTRL_P_CTRL_Q)?;
    assert_eq!(detached(&mut second).await?, id);

    let third = on_terminal(&cluster, &client, &["attach", "-t", &id])?;
    third.shows("again-21").await?;
    exit(third, 9).await?;
    cluster.end().await
}

#[tokio::test]
async fn detached_terminal_waits_for_a_user() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let arguments = [&["run", "-dt", "--"], &SHELL[..]].concat();
    let started = Process::finish(cluster.cli(&client, &arguments), b"").await?;
    let id = started.stdout.trim();
    assert_eq!((started.code, started.stderr.as_str()), (Some(0), ""));
    let mut terminal = on_terminal(&cluster, &client, &["attach", "-t", id])?;
    terminal.shows("bash-").await?;
    terminal.type_text("stty size; echo here-$((20+1))\r")?;
    terminal.shows("here-21").await?;

    // A terminal that goes away does not end the run.
    terminal.hang_up().await?;
    let again = on_terminal(&cluster, &client, &["attach", "-t", id])?;
    again.shows("here-21").await?;
    exit(again, 7).await?;
    cluster.end().await
}

#[tokio::test]
async fn detach_keys_are_configurable() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let run = [&["run", "-t", "--"], &SHELL[..]].concat();
    let mut configured = cluster.cli(&client, &run);
    configured.env("CODELIA_CLIENT_DETACH_KEYS", "ctrl-a,d");
    let mut terminal = Terminal::start(&configured, 80, 24)?;
    terminal.shows("bash-").await?;
    terminal.type_text(&format!("{CTRL_P_CTRL_Q}echo still-$((20+1))\r"))?;
    terminal.shows("still-21").await?;
    terminal.type_text("\u{1}d")?;
    let id = detached(&mut terminal).await?;

    let option = ["attach", "-t", "--detach-keys", "ctrl-x", &id];
    let mut terminal = on_terminal(&cluster, &client, &option)?;
    terminal.shows("still-21").await?;
    terminal.type_text("\u{18}")?;
    assert_eq!(detached(&mut terminal).await?, id);

    let shown = Process::finish(cluster.cli(&client, &["config", "show"]), b"").await?;
    assert!(shown.stdout.contains("client.detach_keys"), "{shown:?}");
    let mut wrong =
        on_terminal(&cluster, &client, &["attach", "-t", "--detach-keys", "ctrl-1", &id])?;
    wrong.shows("is not a key").await?;
    assert_eq!(wrong.exited().await?.code(), Some(125));
    exit(on_terminal(&cluster, &client, &["attach", "-t", &id])?, 0).await?;
    cluster.end().await
}

#[tokio::test]
async fn attach_to_session_opens_a_shell() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "echo 42 > answer").await?;
    let mut terminal = on_terminal(&cluster, &client, &["attach", &session.session_id])?;
    terminal.type_text("test -t 0 && echo \"the-answer-$(cat answer)\"\r")?;
    terminal.shows("the-answer-42").await?;
    exit(terminal, 9).await?;

    let script = b"cat answer; exit 5";
    let piped =
        Process::finish(cluster.cli(&client, &["attach", &session.session_id]), script).await?;
    assert_eq!((piped.code, piped.stdout.as_str()), (Some(5), "42\n"), "{piped:?}");
    let unknown = Process::finish(cluster.cli(&client, &["attach", "nothing"]), b"").await?;
    assert!(unknown.stderr.contains("neither a session nor a run"), "{unknown:?}");
    let nested = Process::finish(cluster.cli(&client, &["run", "--vm", "--", "true"]), b"").await?;
    assert!(
        nested.stderr.contains("--vm: ") && nested.stderr.contains("--mode container"),
        "{nested:?}"
    );
    cluster.end().await
}
