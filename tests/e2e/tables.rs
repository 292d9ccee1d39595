//! How the command line prints lists and errors.

use anyhow::{Context, Result};
use codelia_proto::v1::CreateSessionRequest;
use codelia_tests::{Cluster, Process, Screen, Terminal, command};

#[tokio::test]
async fn lists_fit_their_terminal_or_100_columns() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let alias = "a".repeat(63);
    let session = operator
        .create(CreateSessionRequest { alias: alias.clone(), ..Default::default() })
        .await?;
    let argument = "x".repeat(300);
    for _ in 0..3 {
        let run = operator.start(command(&session.name, &["echo", &argument])).await?;
        operator.watch_to_end(&run.name, 0).await?;
    }
    let create = [
        "keys", "create", "--name", &alias, "--scope", "run", "--scope", "files", "--scope",
        "audit",
    ];
    assert_eq!(Process::finish(cluster.cli(&operator, &create), b"").await?.code, Some(0));
    let lists: [&[&str]; 5] = [
        &["ps", "--all"],
        &["session", "list"],
        &["keys", "list"],
        &["workers", "list"],
        &["tenants", "list"],
    ];
    for arguments in lists {
        let piped = Process::finish(cluster.cli(&operator, arguments), b"").await?;
        let narrow = Screen::of(&cluster.cli(&operator, arguments), 80).await?;
        let wide = Screen::of(&cluster.cli(&operator, arguments), 400).await?;
        let piped: Vec<String> = piped.stdout.lines().map(str::to_owned).collect();
        for (lines, columns) in [(&piped, 100), (&narrow.lines, 80), (&wide.lines, 400)] {
            assert!(lines.len() > 1, "{arguments:?}: {lines:?}");
            assert!(
                lines.iter().all(|line| line.chars().count() <= columns),
                "{arguments:?}: {lines:#?}"
            );
            assert!(
                lines[1..].iter().all(|line| line.contains(" ago")),
                "times are relative: {lines:#?}"
            );
        }
        let is_cut = |lines: &[String]| lines.iter().any(|line| line.contains('…'));
        let has_long_cells =
            arguments[0] == "ps" || arguments[0] == "session" || arguments[0] == "keys";
        assert_eq!((is_cut(&piped), is_cut(&wide.lines)), (has_long_cells, false), "{arguments:?}");
    }

    // What a table shows of an id is enough to name the object.
    let listed = Process::finish(cluster.cli(&operator, &["ps", "--all"]), b"").await?;
    let shown = listed.stdout.lines().nth(1).and_then(|line| line.split_whitespace().next());
    let shown = shown.context("a run in the list")?;
    let attached = Process::finish(cluster.cli(&operator, &["attach", shown]), b"").await?;
    assert_eq!(attached.stdout.trim_end(), argument, "{attached:?}");
    cluster.end().await
}

#[tokio::test]
async fn colours_appear_only_on_terminals() -> Result<()> {
    const RED_ERROR: &str = "\u{1b}[1;31merror:\u{1b}[0m";
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let program = cluster.cli(&client, &["kill", "nonsense"]);
    let terminal = Terminal::start(&program, 100, 30)?;
    terminal.shows(RED_ERROR).await?;
    // The screen is without colours: it sets NO_COLOR.
    let screen = Screen::of(&program, 100).await?;
    assert!(screen.lines[0].starts_with("error: "), "{screen:?}");
    let piped = Process::finish(program, b"").await?;
    assert!(piped.stderr.starts_with("error: ") && !piped.stderr.contains('\u{1b}'), "{piped:?}");
    cluster.end().await
}
