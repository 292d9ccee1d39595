//! File calls: what they do, what they refuse, and that they lead nowhere else.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result, ensure};
use codelia_policy::{FilesystemPolicy, Limits, LimitsRequest, Policy};
use codelia_proto::{duration_to_proto, v1::*};
use codelia_store::{EventKind, NewSession, Quotas, Scope as KeyScope, SessionSpec};
use codelia_tests::{
    Client, Cluster, ClusterOptions, Exec, Process, ProcessOutput, eventually, is_root, refusal, shell,
    within,
};
use codelia_types::{Mode, SessionId};
use rustix::process::Signal;
use sha2::{Digest, Sha256};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::isolation::isolating;

/// Bytes that no compression or cutting at round sizes leaves alone by chance.
fn bytes(count: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

fn open(session: &str, path: &str) -> WriteFileOpen {
    WriteFileOpen { parent: session.to_owned(), path: path.to_owned(), ..Default::default() }
}

fn read(session: &str, path: &str) -> ReadFileRequest {
    ReadFileRequest { parent: session.to_owned(), path: path.to_owned(), ..Default::default() }
}

async fn stat(client: &Client, session: &str, path: &str) -> Result<File, Status> {
    let request = StatFileRequest { parent: session.into(), path: path.into(), no_follow: false };
    Ok(client.files().stat_file(request).await?.into_inner().file.unwrap_or_default())
}

async fn list(
    client: &Client,
    session: &str,
    path: &str,
    page_size: i32,
) -> Result<Vec<Vec<String>>, Status> {
    let mut pages = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListFilesRequest { parent: session.into(), path: path.into(), page_size, page_token };
        let page = client.files().list_files(request).await?.into_inner();
        pages.push(page.files.into_iter().map(|file| file.path).collect());
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(pages);
        }
    }
}

async fn make(client: &Client, session: &str, path: &str, parents: bool) -> Result<(), Status> {
    let request = MakeDirectoryRequest { parent: session.into(), path: path.into(), parents };
    client.files().make_directory(request).await.map(drop)
}

async fn move_to(
    client: &Client,
    session: &str,
    from: &str,
    to: &str,
    overwrite: bool,
) -> Result<(), Status> {
    let request = MoveFileRequest {
        parent: session.into(),
        source_path: from.into(),
        destination_path: to.into(),
        overwrite,
    };
    client.files().move_file(request).await.map(drop)
}

async fn copy_to(
    client: &Client,
    session: &str,
    from: &str,
    to: &str,
    overwrite: bool,
) -> Result<(), Status> {
    let request = CopyFileRequest {
        parent: session.into(),
        source_path: from.into(),
        destination_path: to.into(),
        overwrite,
    };
    client.files().copy_file(request).await.map(drop)
}

async fn remove(client: &Client, session: &str, path: &str, recursive: bool) -> Result<(), Status> {
    let request = RemoveFileRequest { parent: session.into(), path: path.into(), recursive };
    client.files().remove_file(request).await.map(drop)
}

async fn edit(client: &Client, session: &str, old: &str, new: &str, all: bool) -> Result<i64, Status> {
    let request = EditFileRequest {
        parent: session.into(),
        path: "text".into(),
        old_text: old.into(),
        new_text: new.into(),
        replace_all: all,
        ..Default::default()
    };
    Ok(client.files().edit_file(request).await?.into_inner().replacements)
}

fn told<T>(answer: Result<T, Status>) -> (Code, String) {
    match answer {
        Ok(_) => (Code::Ok, String::new()),
        Err(status) => {
            let refusal = refusal(&status);
            (refusal.code, refusal.reason)
        }
    }
}

fn said(code: Code, reason: &str) -> (Code, String) {
    (code, reason.to_owned())
}

/// Where a session's files are on this host.
fn directory(cluster: &Cluster, session: &Session) -> Result<PathBuf> {
    let found = cluster.session_directories()?;
    found.into_iter().find(|path| path.ends_with(&session.session_id)).context("the session's directory")
}

#[tokio::test]
async fn large_file_round_trips_byte_for_byte() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let content = bytes(10_000_000);
    let wanted = WriteFileOpen { mode: Some(0o750), ..open(&session.name, "a.bin") };
    let written = client.write_file(wanted, &content).await?;
    assert_eq!((written.size_bytes, written.mode, written.path.as_str()), (10_000_000, 0o750, "a.bin"));
    let (file, back) = client.read_file(read(&session.name, "/workspace/a.bin")).await?;
    assert!(back == content, "{} bytes came back", back.len());
    assert_eq!(file, written);
    let sum = client.exec(&session.name, "sha256sum < a.bin; stat -c %a a.bin").await?.stdout_text();
    let expected: String = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(sum, format!("{expected}  -\n750\n"));
    let part = ReadFileRequest { offset: 9_999_990, length: Some(4), ..read(&session.name, "a.bin") };
    assert_eq!(client.read_file(part).await?.1, content[9_999_990..9_999_994]);
    let behind = ReadFileRequest { offset: 10_000_001, ..read(&session.name, "a.bin") };
    assert_eq!(client.read_file(behind).await?.1, b"");
    // What is replaced keeps its permissions, and is another file.
    let again = client.put(&session.name, "a.bin", "short").await?;
    assert_eq!((again.mode, again.size_bytes), (0o750, 5));
    assert_ne!(again.etag, written.etag);
    client.exec(&session.name, "echo from a command > b").await?;
    assert_eq!(client.get(&session.name, "b").await?, "from a command\n");
    client.put(&session.name, "empty", "").await?;
    assert_eq!(client.get(&session.name, "empty").await?, "");
    cluster.end().await
}

#[tokio::test]
async fn large_file_is_streamed_not_buffered() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.put(&session.name, "warm", "up").await?;
    let pids = [cluster.workers[0].process.pid(), cluster.apis[0].process.pid()];
    let before = pids.map(peak_memory);
    let (pieces, messages) = mpsc::channel(2);
    let mut files = client.files();
    let call = files.write_file(ReceiverStream::new(messages));
    let feed = async {
        let piece = bytes(1 << 20);
        let send = async |kind| pieces.send(WriteFileRequest { kind: Some(kind) }).await;
        send(write_file_request::Kind::Open(open(&session.name, "large"))).await?;
        for _ in 0..100 {
            send(write_file_request::Kind::Data(piece.clone().into())).await?;
        }
        send(write_file_request::Kind::Finish(WriteFileFinish {})).await?;
        drop(pieces);
        Ok::<_, anyhow::Error>(())
    };
    let (written, fed) = tokio::join!(call, feed);
    fed?;
    assert_eq!(written?.into_inner().file.unwrap_or_default().size_bytes, 100 << 20);
    let mut stream = client.files().read_file(read(&session.name, "large")).await?.into_inner();
    let mut total = 0;
    while let Some(piece) = within("a piece", stream.message()).await? {
        if let Some(read_file_response::Kind::Data(data)) = piece.kind {
            total += data.len();
        }
    }
    assert_eq!(total, 100 << 20);
    for (pid, before) in pids.into_iter().zip(before) {
        let grown = peak_memory(pid) - before;
        assert!(grown < 40_000, "{pid} took {grown} kB more for a file of 102400 kB");
    }
    cluster.end().await
}

/// The most memory that a process has had, in kB.
fn peak_memory(pid: u32) -> i64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a peak of memory")
}

#[tokio::test]
async fn directories_can_be_managed_and_listed() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    make(&client, &name, "a/b/c", true).await?;
    make(&client, &name, "a/b/c", true).await?;
    for file in ["a/3", "a/1", "a/2"] {
        client.put(&name, file, file).await?;
    }
    client.exec(&name, "ln -s 1 a/link; mkfifo a/fifo").await?;
    let pages = list(&client, &name, "a", 2).await?;
    assert_eq!(pages, [vec!["a/1", "a/2"], vec!["a/3", "a/b"], vec!["a/fifo", "a/link"]]);
    assert_eq!(list(&client, &name, "", 0).await?, [["a"]]);
    // A name that is no text is listed, as far as it can be, and pages go on behind it.
    client.exec(&name, "mkdir odd; cd odd; touch a \"$(printf 'b\\377')\" \"$(printf 'b\\376')\" c").await?;
    let odd = list(&client, &name, "odd", 1).await?.concat();
    assert_eq!(odd, ["odd/a", "odd/b\u{fffd}", "odd/b\u{fffd}", "odd/c"]);
    remove(&client, &name, "odd", true).await?;
    let kept = StatFileRequest { parent: name.clone(), path: "a/link".into(), no_follow: true };
    let link = client.files().stat_file(kept).await?.into_inner().file.unwrap_or_default();
    assert_eq!((link.kind(), link.link_target.as_str()), (FileKind::Symlink, "1"));
    let followed = stat(&client, &name, "a/link").await?;
    assert_eq!((followed.kind(), followed.path.as_str()), (FileKind::Regular, "a/1"));
    assert_eq!(stat(&client, &name, "a/fifo").await?.kind(), FileKind::Special);
    assert_eq!(stat(&client, &name, ".").await?.kind(), FileKind::Directory);
    move_to(&client, &name, "a/1", "moved", false).await?;
    copy_to(&client, &name, "moved", "a/copy", false).await?;
    copy_to(&client, &name, "a/2", "a/copy", true).await?;
    assert_eq!(
        (client.get(&name, "moved").await?, client.get(&name, "a/copy").await?),
        ("a/1".into(), "a/2".into())
    );
    remove(&client, &name, "a/fifo", false).await?;
    // A tree whose directories are shut is removed too, and nothing through its links.
    client.exec(&name, "ln -s ../../moved a/b/out; chmod 000 a/b/c").await?;
    remove(&client, &name, "a", true).await?;
    assert_eq!(list(&client, &name, "/workspace", 0).await?, [["moved"]]);
    let left = cluster.workers[0].root.join("trash");
    assert_eq!(fs::read_dir(left)?.count(), 0);
    cluster.end().await
}

#[tokio::test]
async fn edit_replaces_unique_or_all_matches() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let written = client.put(&name, "text", "one two two").await?;
    assert_eq!(edit(&client, &name, "one", "1", false).await?, 1);
    assert_eq!(
        told(edit(&client, &name, "two", "2", false).await),
        said(Code::FailedPrecondition, "TEXT_AMBIGUOUS")
    );
    assert_eq!(
        told(edit(&client, &name, "absent", "x", true).await),
        said(Code::FailedPrecondition, "TEXT_NOT_FOUND")
    );
    assert_eq!(edit(&client, &name, "two", "2", true).await?, 2);
    assert_eq!(client.get(&name, "text").await?, "1 2 2");
    // Who knows an older file changes nothing.
    let stale = EditFileRequest {
        parent: name.clone(),
        path: "text".into(),
        old_text: "1".into(),
        etag: written.etag.clone(),
        ..Default::default()
    };
    assert_eq!(
        told(client.files().edit_file(stale.clone()).await),
        said(Code::FailedPrecondition, "FILE_CHANGED")
    );
    let etag = stat(&client, &name, "text").await?.etag;
    client.files().edit_file(EditFileRequest { etag, ..stale }).await?;
    assert_eq!(client.get(&name, "text").await?, " 2 2");
    let stale = WriteFileOpen { etag: written.etag, ..open(&name, "text") };
    assert_eq!(told(client.write_file(stale, b"x").await), said(Code::FailedPrecondition, "FILE_CHANGED"));
    assert_eq!(list(&client, &name, "", 0).await?, [["text"]], "nothing temporary is left");
    cluster.end().await
}

#[tokio::test]
async fn refusals_have_reasons_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    make(&client, &name, "dir/full", true).await?;
    client.put(&name, "file", "text").await?;
    client.exec(&name, "mkfifo fifo; ln -s /etc/passwd out; ln -s loop loop; ln -s nothing gone").await?;
    let before = list(&client, &name, "", 0).await?;
    let absent = said(Code::NotFound, "FILE_NOT_FOUND");
    let exists = said(Code::AlreadyExists, "FILE_EXISTS");
    let leads_out = said(Code::PermissionDenied, "PATH_LEADS_OUT");
    let special = said(Code::FailedPrecondition, "SPECIAL_FILE");
    let is_dir = said(Code::FailedPrecondition, "IS_A_DIRECTORY");
    let no_dir = said(Code::FailedPrecondition, "NOT_A_DIRECTORY");
    for (path, expected) in [
        ("absent", &absent),
        ("gone", &absent),
        ("dir", &is_dir),
        ("file/x", &no_dir),
        ("fifo", &special),
        ("out", &leads_out),
        ("loop", &said(Code::InvalidArgument, "INVALID_FIELD")),
        ("..", &said(Code::InvalidArgument, "INVALID_FIELD")),
        ("/etc/passwd", &said(Code::InvalidArgument, "INVALID_FIELD")),
    ] {
        assert_eq!(&told(client.get(&name, path).await), expected, "reading {path}");
        if ![&absent].contains(&expected) {
            assert_eq!(&told(client.put(&name, path, "x").await), expected, "writing {path}");
        }
        assert_eq!(&told(copy_to(&client, &name, path, "new", false).await), expected, "copying {path}");
    }
    assert_eq!(told(client.put(&name, "absent/x", "x").await), absent);
    let only_new = WriteFileOpen { create_only: true, ..open(&name, "file") };
    assert_eq!(told(client.write_file(only_new, b"x").await), exists);
    let unfinished =
        [write_file_request::Kind::Open(open(&name, "file")), write_file_request::Kind::Data("x".into())];
    let unfinished = unfinished.map(|kind| WriteFileRequest { kind: Some(kind) });
    let answer = client.files().write_file(tokio_stream::iter(unfinished)).await;
    assert_eq!(refusal(&answer.expect_err("it has no end")).fields, ["finish"]);
    assert_eq!(told(list(&client, &name, "file", 0).await), no_dir);
    assert_eq!(told(make(&client, &name, "file", true).await), exists);
    assert_eq!(told(make(&client, &name, "dir", false).await), exists);
    assert_eq!(told(make(&client, &name, "absent/x", false).await), absent);
    assert_eq!(told(move_to(&client, &name, "file", "dir", false).await), exists);
    assert_eq!(told(move_to(&client, &name, "absent", "x", false).await), absent);
    assert_eq!(told(copy_to(&client, &name, "file", "dir", true).await), is_dir);
    assert_eq!(
        told(remove(&client, &name, "dir", false).await),
        said(Code::FailedPrecondition, "DIRECTORY_NOT_EMPTY")
    );
    assert_eq!(told(remove(&client, &name, "absent", true).await), absent);
    assert_eq!(told(remove(&client, &name, ".", true).await).0, Code::InvalidArgument);
    assert_eq!(list(&client, &name, "", 0).await?, before);
    assert_eq!(client.get(&name, "file").await?, "text");

    let only_runs = client.with_secret(&cluster.key("a", &[KeyScope::Run]).await?)?;
    assert_eq!(told(only_runs.get(&name, "file").await), said(Code::PermissionDenied, "SCOPE_MISSING"));
    let only_files = client.with_secret(&cluster.key("a", &[KeyScope::Files]).await?)?;
    assert_eq!(only_files.get(&name, "file").await?, "text");
    client.close(&name).await?;
    assert_eq!(told(client.get(&name, "file").await), said(Code::FailedPrecondition, "SESSION_ENDED"));
    cluster.end().await
}

/// A session of mode bwrap, the directory of its files, and a secret of the host beside it.
async fn isolated() -> Result<Option<(Cluster, Client, Session, PathBuf, PathBuf)>> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(None) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.put(&session.name, "inside", "inside").await?;
    let outside = cluster.directory().join("outside");
    fs::create_dir(&outside)?;
    fs::write(outside.join("f"), "outside")?;
    let files = directory(&cluster, &session)?;
    Ok(Some((cluster, client, session, files, outside)))
}

#[tokio::test]
async fn planted_links_cannot_escape_the_workspace() -> Result<()> {
    let Some((cluster, client, session, files, outside)) = isolated().await? else { return Ok(()) };
    let name = &session.name;
    let secret = outside.join("f");
    let script = format!(
        "ln -s {secret} absolute; ln -s {outside} directory; ln -s ../../../../../../../../../{secret} up
         ln -s /proc/self/root{secret} magic; ln -s /proc/self/cwd/inside own; ln -s /proc/1/root/etc procs
         mkdir d; ln -s ../absolute d/chain; ln -s /workspace/inside good; ln -s \"$PWD\" home",
        secret = secret.display(),
        outside = outside.display(),
    );
    let made = client.exec(name, &format!("set -e; {script}; echo made")).await?;
    assert_eq!(made.stdout_text(), "made\n");
    // The control: a naive open of these names gets the secret.
    for naive in ["absolute", "directory/f", "up", "magic", "d/chain"] {
        assert_eq!(fs::read_to_string(files.join(naive))?, "outside", "{naive} would not fool anybody");
    }
    let leads_out = said(Code::PermissionDenied, "PATH_LEADS_OUT");
    for path in ["absolute", "directory/f", "up", "magic", "own", "procs/passwd", "d/chain"] {
        assert_eq!(told(client.get(name, path).await), leads_out, "reading {path}");
        assert_eq!(told(client.put(name, path, "taken").await), leads_out, "writing {path}");
        assert_eq!(told(copy_to(&client, name, path, "copy", false).await), leads_out, "copying {path}");
        assert_eq!(told(copy_to(&client, name, "inside", path, true).await), leads_out, "copying to {path}");
    }
    for path in ["directory/new", "procs/new"] {
        assert_eq!(told(make(&client, name, path, true).await), leads_out, "{path}");
        assert_eq!(told(move_to(&client, name, "inside", path, true).await), leads_out, "{path}");
    }
    assert_eq!(told(remove(&client, name, "directory/f", false).await), leads_out);
    assert_eq!(told(list(&client, name, "directory", 0).await), leads_out);
    assert_eq!(told(stat(&client, name, "absolute").await), leads_out);
    // A link is removed itself; what it leads to stays. Those that stay inside are followed, as commands see them.
    remove(&client, name, "directory", true).await?;
    assert_eq!(client.get(name, "good").await?, "inside");
    assert_eq!(client.get(name, "home/good").await?, "inside");
    assert_eq!(fs::read_dir(&outside)?.count(), 1);
    assert_eq!(fs::read_to_string(&secret)?, "outside");
    let events = cluster.store.event_list(&"a".parse()?, Some(EventKind::FileRefused), None, 100).await?;
    assert!(events.len() >= 30, "each attempt is an event: {}", events.len());
    let event = events.last().context("an event")?;
    assert_eq!(event.body.field.as_deref(), Some("path"));
    assert_eq!(event.body.detail["reason"], "PATH_LEADS_OUT");
    assert_eq!(event.subject.session.map(|id| id.to_string()), Some(session.session_id.clone()));
    cluster.end().await
}

#[tokio::test]
async fn swapped_links_cannot_fool_file_calls() -> Result<()> {
    let Some((cluster, client, session, files, outside)) = isolated().await? else { return Ok(()) };
    let name = &session.name;
    let script = format!(
        "mkdir d; echo inside > d/f; echo swapping
         while :; do mv d real; ln -s {} d; rm d; mv real d; done",
        outside.display()
    );
    let mut swapping = Exec::start(&client, shell(name, &script)).await?;
    swapping.until("it swaps", |seen| seen.stdout_text().contains("swapping")).await?;
    // The control: who opens the name again and again is fooled.
    let fooled = || {
        let read = fs::read_to_string(files.join("d/f"));
        std::future::ready(read.is_ok_and(|text| text == "outside").then_some(()))
    };
    let mut tries = 0;
    while fooled().await.is_none() {
        tries += 1;
        ensure!(tries < 1_000_000, "the control never saw a swap");
    }
    let (mut inside, mut refused) = (0, 0);
    for round in 0..100 {
        match client.get(name, "d/f").await {
            Ok(text) => {
                assert_eq!(text, "inside\n", "round {round}");
                inside += 1;
            }
            Err(status) if [Code::PermissionDenied, Code::NotFound].contains(&status.code()) => refused += 1,
            Err(status) => panic!("round {round}: {status:?}"),
        }
        // Whether it succeeds depends on the moment; where it lands does not.
        for attempt in [
            client.put(name, "d/written", "x").await.map(drop),
            make(&client, name, "d/made", false).await,
            remove(&client, name, "d/f2", false).await,
            copy_to(&client, name, "inside", "d/f3", true).await,
        ] {
            if let Err(status) = attempt {
                let code = status.code();
                let expected = [Code::PermissionDenied, Code::NotFound, Code::AlreadyExists];
                assert!(expected.contains(&code), "round {round}: {status:?}");
            }
        }
    }
    assert!(inside > 0 && refused > 0, "{inside} inside, {refused} refused: the race was not run");
    let left: Vec<_> = fs::read_dir(&outside)?.flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["f"], "something landed outside");
    assert_eq!(fs::read_to_string(outside.join("f"))?, "outside");
    drop(swapping);
    cluster.end().await
}

#[tokio::test]
async fn file_calls_act_as_session_user() -> Result<()> {
    let Some((cluster, client, session, files, outside)) = isolated().await? else { return Ok(()) };
    if !is_root() {
        println!("skipped: only root gives sessions users of their own");
        return cluster.end().await;
    }
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let name = &session.name;
    make(&client, name, "made/deep", true).await?;
    copy_to(&client, name, "inside", "copied", false).await?;
    client.put(name, "inside", "inside again").await?;
    let owner = fs::metadata(&files)?.uid();
    assert!(owner >= 200_000, "the session has a user of its own: {owner}");
    for made in ["inside", "copied", "made", "made/deep"] {
        let found = fs::metadata(files.join(made))?;
        assert_eq!((found.uid(), found.gid()), (owner, owner), "{made}");
    }
    // A second name of a file that only root may read, as a broken mount or an old kernel might leave one.
    let secret = outside.join("f");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
    fs::hard_link(&secret, files.join("second-name"))?;
    let denied = said(Code::PermissionDenied, "FILE_PERMISSION");
    assert_eq!(told(client.get(name, "second-name").await), denied);
    let command = client.exec(name, "cat second-name || echo denied").await?;
    assert_eq!(command.stdout_text(), "denied\n", "the control: a command may not either");
    // What is replaced is the name here: the file that it was shared with stays as it was.
    client.put(name, "second-name", "taken").await?;
    assert_eq!(fs::read_to_string(&secret)?, "outside");
    client.exec(name, "echo x > shut; chmod 000 shut; mkdir closed; chmod 000 closed").await?;
    client.exec(name, "mkdir -p fixed/sub; echo x > fixed/x; chmod 555 fixed").await?;
    for (path, recursive) in [("fixed/sub", true), ("fixed/sub", false), ("fixed/x", false)] {
        assert_eq!(told(remove(&client, name, path, recursive).await), denied, "{path}");
    }
    assert_eq!(told(client.put(name, "fixed/x", "x").await), denied);
    assert_eq!(told(move_to(&client, name, "fixed/x", "x", false).await), denied);
    assert_eq!(told(client.get(name, "shut").await), denied);
    assert_eq!(told(client.put(name, "closed/x", "x").await), denied);
    assert_eq!(told(list(&client, name, "closed", 0).await), denied);
    let setuid = client.exec(name, "cp /bin/sh own; chmod 4755 own; echo done").await?;
    assert_eq!(setuid.stdout_text(), "done\n");
    let copied = client.put(name, "own", "#!/bin/sh").await?;
    assert_eq!(copied.mode, 0o755, "privileged bits are not kept");
    cluster.end().await
}

#[tokio::test]
async fn special_files_are_refused_and_never_opened() -> Result<()> {
    let Some((cluster, client, session, _, _)) = isolated().await? else { return Ok(()) };
    let name = &session.name;
    let script = "mkfifo fifo; ln -s fifo alias; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'
                  (echo sent > fifo; echo opened) & echo waits; wait";
    let mut writer = Exec::start(&client, shell(name, script)).await?;
    writer.until("a writer waits at the FIFO", |seen| seen.stdout_text().contains("waits")).await?;
    let special = said(Code::FailedPrecondition, "SPECIAL_FILE");
    for path in ["fifo", "alias", "socket"] {
        assert_eq!(told(client.get(name, path).await), special, "{path}");
        assert_eq!(told(client.put(name, path, "x").await), special, "{path}");
        assert_eq!(told(copy_to(&client, name, path, "copy", false).await), special, "{path}");
    }
    assert!(!writer.transcript.stdout_text().contains("opened"), "the writer was let in");
    // The control: whoever opens it lets the writer in.
    client.exec(name, "cat fifo").await?;
    writer.until("the writer was let in", |seen| seen.stdout_text().contains("opened")).await?;
    cluster.end().await
}

/// A session with a policy about its workspace: such a policy reaches file calls even where no caller may
/// ask for one yet.
async fn with_policy(cluster: &Cluster, filesystem: FilesystemPolicy, limits: Limits) -> Result<String> {
    let spec = SessionSpec {
        mode: Mode::Logical,
        limits,
        requested_limits: LimitsRequest::default(),
        network: None,
        policy: Policy { filesystem, ..Policy::default() },
    };
    let id = SessionId::generate();
    let new = NewSession {
        id,
        tenant: &"a".parse()?,
        alias: None,
        spec: &spec,
        labels: &BTreeMap::new(),
        ttl: Duration::from_secs(600),
        idle_ttl: None,
        allow_data_loss: false,
        idempotency: None,
    };
    cluster.store.session_create(new, Quotas::default()).await?;
    Ok(format!("sessions/{id}"))
}

#[tokio::test]
async fn session_policy_applies_to_file_calls() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let policy = FilesystemPolicy {
        read_only_paths: Some(vec!["/workspace/fixed".into()]),
        denied_paths: vec!["/workspace/a/secret".into()],
        ..FilesystemPolicy::default()
    };
    let limits = Limits { file_bytes: 1000, ..Limits::default() };
    let name = with_policy(&cluster, policy, limits).await?;
    make(&client, &name, "a", false).await?;
    let files = cluster.session_directories()?.into_iter().next().context("a directory")?;
    fs::create_dir(files.join("fixed"))?;
    fs::write(files.join("fixed/file"), "fixed")?;
    fs::write(files.join("a/secret"), "secret")?;
    std::os::unix::fs::symlink("secret", files.join("a/alias"))?;
    std::os::unix::fs::symlink("/workspace/fixed", files.join("other"))?;
    let denied = said(Code::PermissionDenied, "PATH_DENIED");
    for path in ["a/secret", "a/alias"] {
        assert_eq!(told(client.get(&name, path).await), denied, "{path}");
        assert_eq!(told(client.put(&name, path, "x").await), denied, "{path}");
        assert_eq!(told(stat(&client, &name, path).await), denied, "{path}");
    }
    assert_eq!(told(remove(&client, &name, "a/secret", false).await), denied);
    assert_eq!(told(remove(&client, &name, "a", true).await), denied);
    assert_eq!(told(move_to(&client, &name, "a", "b", false).await), denied);
    assert_eq!(list(&client, &name, "a", 0).await?, [["a/alias"]], "what is denied is not listed");
    for path in ["fixed/file", "other/file"] {
        assert_eq!(client.get(&name, path).await?, "fixed");
        assert_eq!(told(client.put(&name, path, "x").await), denied, "{path}");
        assert_eq!(told(remove(&client, &name, path, false).await), denied, "{path}");
    }
    assert_eq!(told(make(&client, &name, "fixed/new", false).await), denied);
    assert_eq!(told(move_to(&client, &name, "a/alias", "fixed/x", false).await), denied);
    // The control: what the policy does not name may be changed.
    client.put(&name, "free", "x").await?;
    move_to(&client, &name, "free", "a/free", false).await?;
    remove(&client, &name, "a/alias", false).await?;
    let too_large = said(Code::ResourceExhausted, "FILE_TOO_LARGE");
    client.put(&name, "exact", &"x".repeat(1000)).await?;
    assert_eq!(told(client.put(&name, "more", &"x".repeat(1001)).await), too_large);
    assert_eq!(told(stat(&client, &name, "more").await).0, Code::NotFound);
    let events = cluster.store.event_list(&"a".parse()?, Some(EventKind::FileRefused), None, 100).await?;
    let rules: Vec<_> = events.iter().filter_map(|event| event.body.field.as_deref()).collect();
    for rule in ["policy.filesystem.denied_paths", "policy.filesystem.read_only_paths"] {
        assert!(rules.contains(&rule), "{rules:?}");
    }
    cluster.end().await
}

/// Files without a name that a process writes.
fn unnamed_files(pid: u32) -> Vec<u64> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let unnamed = open.filter(|fd| {
        fs::read_link(fd.path()).is_ok_and(|target| {
            let target = target.to_string_lossy().into_owned();
            target.contains("/sessions/") && target.ends_with("(deleted)")
        })
    });
    unnamed.filter_map(|fd| Some(fs::metadata(fd.path()).ok()?.len())).collect()
}

/// An upload of which a megabyte has reached the worker's disk, and that goes on.
async fn half_uploaded(cluster: &Cluster, client: &Client, session: &str) -> Result<Half> {
    let (pieces, messages) = mpsc::channel(4);
    let send = |kind| pieces.try_send(WriteFileRequest { kind: Some(kind) });
    send(write_file_request::Kind::Open(open(session, "upload")))?;
    send(write_file_request::Kind::Data(vec![1; 1 << 20].into()))?;
    let mut files = client.files();
    let mut call = JoinSet::new();
    call.spawn(async move { files.write_file(ReceiverStream::new(messages)).await.map(drop) });
    let pid = cluster.workers[0].process.pid();
    let arrived = || async { unnamed_files(pid).contains(&(1 << 20)).then_some(()) };
    eventually("half of the file is on the disk", arrived).await;
    Ok(Half { pieces, call })
}

struct Half {
    pieces: mpsc::Sender<WriteFileRequest>,
    call: JoinSet<Result<(), Status>>,
}

#[tokio::test]
async fn worker_killed_during_upload_leaves_nothing() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.put(&session.name, "before", "before").await?;
    let files = directory(&cluster, &session)?;
    let mut half = half_uploaded(&cluster, &client, &session.name).await?;
    let worker = &mut cluster.workers[0].process;
    worker.signal(Signal::KILL)?;
    worker.exited().await?;
    let answer = within("the caller is told", half.call.join_next()).await.context("an answer")??;
    assert_eq!(answer.expect_err("the worker is gone").code(), Code::Unavailable);
    drop(half.pieces);
    let names = |path: &PathBuf| -> Result<Vec<_>> {
        Ok(fs::read_dir(path)?.flatten().map(|e| e.file_name()).collect())
    };
    assert_eq!(names(&files)?, ["before"]);
    assert!(names(&cluster.workers[0].root.join("trash"))?.is_empty());
    cluster.restart_worker(0).await?;
    let served = || async { client.get(&session.name, "before").await.ok() };
    assert_eq!(eventually("the session is served again", served).await, "before");
    assert_eq!(list(&client, &session.name, "", 0).await?, [["before"]]);
    client.put(&session.name, "upload", "whole").await?;
    cluster.end().await
}

#[tokio::test]
async fn aborted_upload_leaves_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.put(&session.name, "upload", "before").await?;
    // A connection of its own, which ends without a word.
    let leaving = Client::connect(&client.endpoint, &client.secret).await?;
    let half = half_uploaded(&cluster, &leaving, &session.name).await?;
    drop(half.call);
    drop(leaving);
    let pid = cluster.workers[0].process.pid();
    eventually("the worker lets go of it", || async { unnamed_files(pid).is_empty().then_some(()) }).await;
    drop(half.pieces);
    assert_eq!(client.get(&session.name, "upload").await?, "before");
    assert_eq!(list(&client, &session.name, "", 0).await?, [["upload"]]);
    cluster.end().await
}

#[tokio::test]
async fn full_disk_is_reported_and_old_file_stays() -> Result<()> {
    let mut cluster = Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let Some(disk) = Disk::mount(&cluster.directory().join("disk"))? else { return cluster.end().await };
    let root = disk.0.join("root").display().to_string();
    cluster.add_worker_with(&[("CODELIA_SANDBOX_ROOT", root.as_str())]).await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    client.put(&name, "file", "before").await?;
    let full = said(Code::ResourceExhausted, "DISK_FULL");
    assert_eq!(told(client.write_file(open(&name, "file"), &bytes(16 << 20)).await), full);
    assert_eq!(client.get(&name, "file").await?, "before");
    client.write_file(open(&name, "file"), &bytes(1 << 20)).await.context("the space is free again")?;
    cluster.stop_processes().await?;
    drop(disk);
    cluster.end().await
}

/// A small disk, for root alone.
struct Disk(PathBuf);

impl Disk {
    fn mount(path: &std::path::Path) -> Result<Option<Self>> {
        if !codelia_tests::available("root", (!is_root()).then_some("only root can mount a small disk")) {
            return Ok(None);
        }
        fs::create_dir_all(path)?;
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m,mode=0755", "tmpfs"])
            .arg(path)
            .status()?;
        ensure!(mounted.success(), "mount: {mounted}");
        Ok(Some(Self(path.to_owned())))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let status = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "the small disk stays");
    }
}

#[tokio::test]
async fn file_call_acquires_unleased_session() -> Result<()> {
    let mut cluster = Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    assert_eq!(session.worker_id, "", "nobody holds it");
    cluster.add_worker().await?;
    client.put(&session.name, "file", "text").await?;
    assert_eq!(client.get_session(&session.name).await?.worker_id, "worker-0");
    // Its files are where they were when it is taken again, and it does not go on without them.
    cluster.workers[0].process.terminate().await?;
    cluster.restart_worker(0).await?;
    let served = || async { client.get(&session.name, "file").await.ok() };
    assert_eq!(eventually("it is served again", served).await, "text");
    let files = directory(&cluster, &session)?;
    cluster.workers[0].process.terminate().await?;
    fs::remove_dir_all(files)?;
    cluster.restart_worker(0).await?;
    let lost =
        || async { (told(client.get(&session.name, "file").await).1 == "SESSION_DATA_LOST").then_some(()) };
    eventually("its loss is told", lost).await;
    cluster.end().await
}

#[tokio::test]
async fn file_calls_keep_session_active() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let idle_ttl = Duration::from_millis(2500);
    let idle = CreateSessionRequest { idle_ttl: Some(duration_to_proto(idle_ttl)), ..Default::default() };
    let session = client.create(idle).await?;
    let begun = std::time::Instant::now();
    while begun.elapsed() < idle_ttl * 2 {
        client.put(&session.name, "file", "text").await?;
    }
    assert_eq!(client.get_session(&session.name).await?.state(), SessionState::Open);
    let ended = || async {
        let session = client.get_session(&session.name).await.ok()?;
        (session.end_reason() == SessionEndReason::Idle).then_some(())
    };
    eventually("it ends without them", ended).await;
    cluster.end().await
}

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
    assert_eq!(fs::read_to_string(back)?, "hello\n", "a copy that failed changes nothing");
    cluster.end().await
}
