//! `codelia run -t` on a real pseudo-terminal.

use anyhow::Result;
use codelia_tests::{Client, Cluster, Terminal};

fn terminal(cluster: &Cluster, client: &Client, command: &[&str]) -> Result<Terminal> {
    let arguments: Vec<&str> = ["run", "-t", "--"].iter().chain(command).copied().collect();
    Terminal::start(&cluster.cli(client, &arguments), 91, 37)
}

#[tokio::test]
async fn shell_works_on_a_terminal() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let mut terminal = terminal(&cluster, &client, &["bash", "--norc", "--noprofile"])?;
    terminal.shows("bash-").await?;

    // Input is echoed. Computed answers differ from the echo.
    terminal.type_text("[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty-$((20+1))\r")?;
    terminal.shows("tty-21").await?;
    terminal.type_text("stty size; echo size-$((20+2))\r")?;
    assert!(terminal.shows("size-22").await?.contains("37 91"), "{}", terminal.shown());

    terminal.resize(132, 50)?;
    // The new size is sent separately from input, so poll until it arrives.
    terminal.type_text(
        "until [ \"$(stty size)\" = '50 132' ]; do sleep 0.05; done; echo resized-$((20+3))\r",
    )?;
    terminal.shows("resized-23").await?;

    // Interrupt only after the command has started.
    terminal.type_text("sh -c 'echo began-$((20+4)); exec sleep 1000'; echo slept-$?\r")?;
    terminal.shows("began-24").await?;
    terminal.type_text("\u{3}")?;
    terminal.type_text("echo after-$?-$((20+5))\r")?;
    assert!(terminal.shows("after-130-25").await?.contains("^C"), "{}", terminal.shown());
    assert!(!terminal.shown().contains("slept-0"));

    terminal.type_text("printf '\\033[31mred-%d\\033[0m\\n' $((20+6)); echo $TERM\r")?;
    terminal.shows("\u{1b}[31mred-26\u{1b}[0m").await?;
    terminal.type_text("exit 9\r")?;
    assert_eq!(terminal.exited().await?.code(), Some(9));
    cluster.end().await
}

#[tokio::test]
async fn user_terminal_is_restored() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let codelia = cluster.cli(&client, &["run", "-t", "--", "sh", "-c", "exit 4"]);
    let words: Vec<_> = std::iter::once(codelia.get_program()).chain(codelia.get_args()).collect();
    let mut shell = std::process::Command::new("sh");
    shell.args([
        "-c",
        "before=$(stty -g); \"$@\"; code=$?; [ \"$(stty -g)\" = \"$before\" ] && echo same-$code",
        "sh",
    ]);
    shell
        .args(words)
        .env_clear()
        .envs(codelia.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut terminal = Terminal::start(&shell, 80, 24)?;
    terminal.shows("same-4").await?;
    terminal.exited().await?;
    cluster.end().await
}

#[tokio::test]
async fn ctrl_c_cancels_run_without_terminal() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let codelia = cluster.cli(&client, &["run", "--", "sh", "-c", "echo up; exec sleep 1000"]);
    let mut terminal = Terminal::start(&codelia, 80, 24)?;
    terminal.shows("up").await?;
    terminal.type_text("\u{3}")?;
    assert_eq!(terminal.exited().await?.code(), Some(130));
    cluster.end().await
}
