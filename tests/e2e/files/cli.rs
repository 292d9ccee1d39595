//! `codelia cp` and `codelia ls`.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
};

use anyhow::{Context, Result};
use codelia_proto::v1::CreateSessionRequest;
use codelia_tests::{Client, Cluster, Process, ProcessOutput, Terminal, command};

async fn codelia(
    cluster: &Cluster,
    client: &Client,
    arguments: &[&str],
    input: &[u8],
) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), input).await
}

#[tokio::test]
async fn cli_copies_and_lists_files() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    let local = cluster.directory().join("notes.txt");
    fs::write(&local, "hello\n")?;
    let local = local.to_str().context("a path in UTF-8")?;
    let back = cluster.directory().join("back");
    let back = back.to_str().context("a path in UTF-8")?;
    for arguments in [["cp", local, "work:"], ["cp", "work:notes.txt", back], ["cp", local, "work:b"]] {
        let done = codelia(&cluster, &client, &arguments, b"").await?;
        assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
    }
    assert_eq!(fs::read_to_string(back)?, "hello\n");
    let done = codelia(&cluster, &client, &["cp", "--json", "-", "work:in"], b"from stdin").await?;
    let copied: serde_json::Value = serde_json::from_str(&done.stdout)?;
    assert_eq!((&copied["path"], &copied["size_bytes"]), (&"in".into(), &10.into()));
    let done = codelia(&cluster, &client, &["cp", "work:in", "-"], b"").await?;
    assert_eq!(done.stdout, "from stdin");
    let done = codelia(&cluster, &client, &["ls", "--json", "work"], b"").await?;
    let listed: serde_json::Value = serde_json::from_str(&done.stdout)?;
    let names: Vec<_> = listed.as_array().into_iter().flatten().map(|file| file["path"].clone()).collect();
    assert_eq!(names, ["b", "in", "notes.txt"]);
    for place in ["work", "work:notes.txt", "work:/workspace"] {
        let done = codelia(&cluster, &client, &["ls", place], b"").await?;
        assert!(done.code == Some(0) && done.stdout.contains("notes.txt"), "{done:?}");
    }
    for (arguments, words) in [
        (["cp", "work:absent", back], "FILE_NOT_FOUND"),
        (["cp", "work:/etc/passwd", back], "field path"),
        (["cp", local, back], "SESSION:PATH"),
        (["cp", "/nowhere", "work:"], "cannot read /nowhere"),
    ] {
        let done = codelia(&cluster, &client, &arguments, b"").await?;
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(done.stderr.contains(words), "{done:?}");
    }
    assert_eq!(fs::read_to_string(back)?, "hello\n", "a failed copy changes nothing");
    cluster.end().await
}

/// A command makes `result.txt` a link to a file whose name the caller has locally.
#[tokio::test]
async fn download_cannot_choose_local_name() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    let plant = "echo evil > .bashrc; chmod 755 .bashrc; ln -s .bashrc result.txt";
    client.exec(&session.name, plant).await?;
    let home = cluster.directory().join("home");
    fs::create_dir(&home)?;
    fs::write(home.join(".bashrc"), "mine")?;
    let into = home.to_str().context("a path in UTF-8")?;
    let done = codelia(&cluster, &client, &["cp", "--json", "work:result.txt", into], b"").await?;
    assert_eq!(done.code, Some(0), "{done:?}");
    let copied: serde_json::Value = serde_json::from_str(&done.stdout)?;
    assert_eq!(copied["path"], ".bashrc", "the control: the server names another file");
    assert_eq!(fs::read_to_string(home.join(".bashrc"))?, "mine");
    let result = home.join("result.txt");
    assert_eq!(fs::read_to_string(&result)?, "evil\n");
    assert_eq!(fs::metadata(&result)?.permissions().mode() & 0o7700, 0o700);

    // Nothing that exists is replaced or followed without --force.
    let link = home.join("link");
    symlink(".bashrc", &link)?;
    for existing in [&result, &link] {
        let to = existing.to_str().context("a path in UTF-8")?;
        let refused = codelia(&cluster, &client, &["cp", "work:result.txt", to], b"").await?;
        assert!(
            refused.code == Some(1) && refused.stderr.contains("exists (replace it with --force)"),
            "{refused:?}"
        );
        assert_eq!(
            codelia(&cluster, &client, &["cp", "--force", "work:result.txt", to], b"").await?.code,
            Some(0)
        );
    }
    assert!(!link.is_symlink() && fs::read_to_string(home.join(".bashrc"))? == "mine");
    assert_eq!(fs::read_dir(&home)?.count(), 3, "no temporary file is left");
    cluster.end().await
}

/// Names, link targets, labels and arguments that a caller or command chose, on a real terminal.
#[tokio::test]
async fn terminal_gets_no_escape_sequences() -> Result<()> {
    const ATTACK: &str = "\u{1b}]0;owned\u{7}";
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let labels = [("note".to_owned(), format!("label{ATTACK}"))].into();
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), labels, ..Default::default() }).await?;
    let plant = "a=$(printf '\\033]0;owned\\007'); touch \"name$a\"; ln -s \"target$a\" link";
    client.exec(&session.name, plant).await?;
    let argument = format!("argument{ATTACK}");
    let run = client.start(command(&session.name, &["true", &argument])).await?;
    client.watch_to_end(&run.name, 0).await?;
    let absent = format!("work:absent{ATTACK}");
    for arguments in [
        vec!["ls", "work"],
        vec!["ls", "--json", "work"],
        vec!["session", "show", "work"],
        vec!["session", "show", "--json", "work"],
        vec!["ps", "--all", "--json"],
        vec!["ls", &absent],
    ] {
        let piped = codelia(&cluster, &client, &arguments, b"").await?;
        let raw = format!("{}{}", piped.stdout, piped.stderr);
        let is_json = arguments.contains(&"--json");
        assert!(is_json || raw.contains(ATTACK), "the control: a pipe gets it raw: {piped:?}");
        let mut program = cluster.cli(&client, &arguments);
        let mut terminal = Terminal::start(program.env("NO_COLOR", "1"), 200, 50)?;
        terminal.exited().await?;
        let shown = terminal.shows("owned\\u0007").await?;
        assert!(
            shown.contains("\\u001b]0;owned") && !shown.contains('\u{1b}') && !shown.contains('\u{7}'),
            "{shown:?}"
        );
    }
    cluster.end().await
}
