//! `codelia cp` and `codelia ls`.

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use codelia_proto::v1::{CreateSessionRequest, ReadFileRequest};
use codelia_tests::{Client, Cluster, Process, ProcessOutput, Terminal, command, eventually};
use rustix::process::Signal;

use super::workspace::{Workspace, read};

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
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    let local = cluster.directory().join("notes.txt");
    fs::write(&local, "hello\n")?;
    let local = local.to_str().context("a path in UTF-8")?;
    let back = cluster.directory().join("back");
    let back = back.to_str().context("a path in UTF-8")?;
    for arguments in
        [["cp", local, "work:"], ["cp", "work:notes.txt", back], ["cp", local, "work:b"]]
    {
        let done = codelia(&cluster, &client, &arguments, b"").await?;
        assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
    }
    assert_eq!(fs::read_to_string(back)?, "hello\n");
    let done = codelia(&cluster, &client, &["cp", "--json", "-", "work:in"], b"from stdin").await?;
    let copied: serde_json::Value = serde_json::from_str(&done.stdout)?;
    assert_eq!((&copied["path"], &copied["sizeBytes"]), (&"in".into(), &"10".into()));
    let done = codelia(&cluster, &client, &["cp", "work:in", "-"], b"").await?;
    assert_eq!(done.stdout, "from stdin");
    let done = codelia(&cluster, &client, &["ls", "--json", "work"], b"").await?;
    let listed: serde_json::Value = serde_json::from_str(&done.stdout)?;
    let names: Vec<_> =
        listed.as_array().into_iter().flatten().map(|file| file["path"].clone()).collect();
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
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
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
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let labels = [("note".to_owned(), format!("label{ATTACK}"))].into();
    let session = client
        .create(CreateSessionRequest { alias: "work".into(), labels, ..Default::default() })
        .await?;
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
            shown.contains("\\u001b]0;owned")
                && !shown.contains('\u{1b}')
                && !shown.contains('\u{7}'),
            "{shown:?}"
        );
    }
    cluster.end().await
}

/// The part of a download that has arrived.
fn partial_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(".part"));
    parts.filter_map(|entry| entry.metadata().ok()).map(|part| part.len()).sum()
}

#[tokio::test]
async fn resume_continues_an_interrupted_download() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    let made =
        client.exec(&session.name, "head -c 192M /dev/urandom > large; sha256sum < large").await?;
    let sum = made.stdout_text();
    let home = cluster.directory().join("home");
    fs::create_dir(&home)?;
    let into = home.to_str().context("a path in UTF-8")?;
    let arguments = ["cp", "--resume", "work:large", into];
    let interrupted = async || -> Result<u64> {
        let mut copy =
            Process::start("copy", cluster.cli(&client, &arguments), cluster.directory())?;
        eventually("a part of the file", || async { (partial_bytes(&home) > 0).then_some(()) })
            .await;
        copy.signal(Signal::KILL)?;
        copy.exited().await?;
        Ok(partial_bytes(&home))
    };
    let first = interrupted().await?;
    assert!(first > 0 && first < 192 << 20, "{first} bytes");
    assert!(!home.join("large").exists());
    // What has arrived is not read again: if it is changed, the copy has the change.
    let part = fs::read_dir(&home)?.flatten().next().context("a part")?.path();
    fs::OpenOptions::new().write(true).open(&part)?.write_all_at(b"mark", 0)?;
    let done = codelia(&cluster, &client, &arguments, b"").await?;
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""), "{done:?}");
    let copied = home.join("large");
    assert_eq!(fs::read_dir(&home)?.count(), 1, "no part is left");
    let mut bytes = fs::read(&copied)?;
    assert_eq!((bytes.len(), &bytes[..4]), (192 << 20, &b"mark"[..]));
    let original = ReadFileRequest { length: Some(4), ..read(&session.name, "large") };
    bytes[..4].copy_from_slice(&client.read_file(original).await?.1);
    fs::write(&copied, bytes)?;
    let summed =
        std::process::Command::new("sha256sum").stdin(fs::File::open(&copied)?).output()?;
    assert_eq!(String::from_utf8(summed.stdout)?, sum, "the rest is the same");

    // A file that has changed is read from its beginning.
    fs::remove_file(&copied)?;
    interrupted().await?;
    client.exec(&session.name, "echo new > large").await?;
    assert_eq!(codelia(&cluster, &client, &arguments, b"").await?.code, Some(0));
    assert_eq!(fs::read_to_string(&copied)?, "new\n");
    assert_eq!(fs::read_dir(&home)?.count(), 1, "the part of the former file is removed");
    cluster.end().await
}

#[tokio::test]
async fn resume_skips_complete_files() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    let local = cluster.directory().join("t");
    fs::create_dir_all(local.join("sub"))?;
    for path in ["same", "longer", "sub/older"] {
        fs::write(local.join(path), path)?;
    }
    let from = local.to_str().context("a path in UTF-8")?;
    let up = ["cp", "-r", "--resume", from, "work:"];
    assert_eq!(codelia(&cluster, &client, &up, b"").await?.code, Some(0));
    let etags = async || -> Result<Vec<String>> {
        let mut etags = Vec::new();
        for path in ["t/same", "t/longer", "t/sub/older"] {
            etags.push(Workspace::new(&client, &session.name).stat(path).await?.etag);
        }
        Ok(etags)
    };
    let before = etags().await?;
    fs::write(local.join("longer"), "longer than before")?;
    let future = SystemTime::now() + Duration::from_secs(3600);
    fs::File::options().write(true).open(local.join("sub/older"))?.set_modified(future)?;
    assert_eq!(codelia(&cluster, &client, &up, b"").await?.code, Some(0));
    let after = etags().await?;
    let is_kept: Vec<bool> =
        before.iter().zip(&after).map(|(before, after)| before == after).collect();
    assert_eq!(is_kept, [true, false, false], "only the complete file is skipped");

    // The other way: local files are kept if they are complete, and not replaced without --force.
    let home = cluster.directory().join("home");
    let into = home.to_str().context("a path in UTF-8")?;
    let down = ["cp", "-r", "--resume", "work:t", into];
    assert_eq!(codelia(&cluster, &client, &down, b"").await?.code, Some(0));
    let inode = |path: &str| Ok::<_, anyhow::Error>(fs::metadata(home.join(path))?.ino());
    let kept = inode("same")?;
    fs::remove_file(home.join("sub/older"))?;
    // Into the same directory again: under an existing one `cp -r` would make another.
    let down = ["cp", "-r", "--resume", "work:t/sub", into];
    assert_eq!(codelia(&cluster, &client, &down, b"").await?.code, Some(0));
    assert_eq!(fs::read_to_string(home.join("sub/older"))?, "sub/older");
    let down = ["cp", "--resume", "work:t/same", "work:t/longer", into];
    assert_eq!(codelia(&cluster, &client, &down, b"").await?.code, Some(0));
    assert_eq!(inode("same")?, kept);
    fs::write(home.join("longer"), "mine")?;
    let refused = codelia(&cluster, &client, &down, b"").await?;
    assert!(refused.code == Some(1) && refused.stderr.contains("--force"), "{refused:?}");
    let refused = codelia(&cluster, &client, &["cp", "--resume", "work:t/same", "-"], b"").await?;
    assert!(
        refused.code == Some(1) && refused.stderr.contains("--resume needs files"),
        "{refused:?}"
    );
    cluster.end().await
}

#[tokio::test]
async fn archives_show_progress_on_terminals() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    client.exec(&session.name, "mkdir t; head -c 64M /dev/zero > t/f").await?;
    let archive = cluster.directory().join("t.tar");
    let archive = archive.to_str().context("a path in UTF-8")?;
    for arguments in [&["export", "work:t", "-o", archive][..], &["import", archive, "work:copy"]] {
        let mut terminal = Terminal::start(&cluster.cli(&client, arguments), 100, 30)?;
        terminal.shows("MiB/s").await?;
        assert!(terminal.exited().await?.success());
    }
    cluster.end().await
}
