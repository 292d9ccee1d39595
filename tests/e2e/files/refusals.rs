//! Refused file calls: their reasons, and that they change nothing.

use anyhow::Result;
use codelia_proto::v1::*;
use codelia_store::Scope as KeyScope;
use codelia_tests::{Cluster, Exec, refusal, shell};
use tonic::Code;

use super::workspace::{Isolated, Workspace, open, outcome, refused};

#[tokio::test]
async fn refusals_have_reasons_and_change_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let workspace = Workspace::new(&client, &name);
    workspace.make_directory("dir/full", true).await?;
    client.put(&name, "file", "text").await?;
    client
        .exec(&name, "mkfifo fifo; ln -s /etc/passwd out; ln -s loop loop; ln -s nothing gone")
        .await?;
    let before = workspace.list("", 0).await?;
    let absent = refused(Code::NotFound, "FILE_NOT_FOUND");
    let exists = refused(Code::AlreadyExists, "FILE_EXISTS");
    let leads_out = refused(Code::PermissionDenied, "PATH_LEADS_OUT");
    let special = refused(Code::FailedPrecondition, "SPECIAL_FILE");
    let is_dir = refused(Code::FailedPrecondition, "IS_A_DIRECTORY");
    let not_dir = refused(Code::FailedPrecondition, "NOT_A_DIRECTORY");
    for (path, expected) in [
        ("absent", &absent),
        ("gone", &absent),
        ("dir", &is_dir),
        ("file/x", &not_dir),
        ("fifo", &special),
        ("out", &leads_out),
        ("loop", &refused(Code::InvalidArgument, "INVALID_FIELD")),
        ("..", &refused(Code::InvalidArgument, "INVALID_FIELD")),
        ("/etc/passwd", &refused(Code::InvalidArgument, "INVALID_FIELD")),
    ] {
        assert_eq!(&outcome(client.get(&name, path).await), expected, "reading {path}");
        if ![&absent].contains(&expected) {
            assert_eq!(&outcome(client.put(&name, path, "x").await), expected, "writing {path}");
        }
        assert_eq!(&outcome(workspace.copy(path, "new", false).await), expected, "copying {path}");
    }
    assert_eq!(outcome(client.put(&name, "absent/x", "x").await), absent);
    let only_new = WriteFileOpen { create_only: true, ..open(&name, "file") };
    assert_eq!(outcome(client.write_file(only_new, b"x").await), exists);
    let unfinished = [
        write_file_request::Kind::Open(open(&name, "file")),
        write_file_request::Kind::Data("x".into()),
    ];
    let unfinished = unfinished.map(|kind| WriteFileRequest { kind: Some(kind) });
    let answer = client.files().write_file(tokio_stream::iter(unfinished)).await;
    assert_eq!(refusal(&answer.expect_err("the upload has no finish message")).fields, ["finish"]);
    assert_eq!(outcome(workspace.list("file", 0).await), not_dir);
    assert_eq!(outcome(workspace.make_directory("file", true).await), exists);
    assert_eq!(outcome(workspace.make_directory("dir", false).await), exists);
    assert_eq!(outcome(workspace.make_directory("absent/x", false).await), absent);
    assert_eq!(outcome(workspace.rename("file", "dir", false).await), exists);
    assert_eq!(outcome(workspace.rename("absent", "x", false).await), absent);
    assert_eq!(outcome(workspace.copy("file", "dir", true).await), is_dir);
    assert_eq!(
        outcome(workspace.remove("dir", false).await),
        refused(Code::FailedPrecondition, "DIRECTORY_NOT_EMPTY")
    );
    assert_eq!(outcome(workspace.remove("absent", true).await), absent);
    assert_eq!(outcome(workspace.remove(".", true).await).0, Code::InvalidArgument);
    assert_eq!(workspace.list("", 0).await?, before);
    assert_eq!(client.get(&name, "file").await?, "text");

    let only_runs = client.with_secret(&cluster.key("a", &[KeyScope::Run]).await?)?;
    assert_eq!(
        outcome(only_runs.get(&name, "file").await),
        refused(Code::PermissionDenied, "SCOPE_MISSING")
    );
    let only_files = client.with_secret(&cluster.key("a", &[KeyScope::Files]).await?)?;
    assert_eq!(only_files.get(&name, "file").await?, "text");
    client.close(&name).await?;
    assert_eq!(
        outcome(client.get(&name, "file").await),
        refused(Code::FailedPrecondition, "SESSION_ENDED")
    );
    cluster.end().await
}

#[tokio::test]
async fn special_files_are_refused_and_never_opened() -> Result<()> {
    let Some(Isolated { cluster, client, session, .. }) = Isolated::start().await? else {
        return Ok(());
    };
    let name = &session.name;
    let workspace = Workspace::new(&client, name);
    let script = "mkfifo fifo; ln -s fifo alias; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'
                  (echo sent > fifo; echo opened) & echo waits; wait";
    let mut writer = Exec::start(&client, shell(name, script)).await?;
    writer
        .until("a writer blocks on the FIFO", |seen| seen.stdout_text().contains("waits"))
        .await?;
    let special = refused(Code::FailedPrecondition, "SPECIAL_FILE");
    for path in ["fifo", "alias", "socket"] {
        assert_eq!(outcome(client.get(name, path).await), special, "{path}");
        assert_eq!(outcome(client.put(name, path, "x").await), special, "{path}");
        assert_eq!(outcome(workspace.copy(path, "copy", false).await), special, "{path}");
    }
    assert!(!writer.transcript.stdout_text().contains("opened"), "a file call opened the FIFO");
    // The control: a reader unblocks the writer.
    client.exec(name, "cat fifo").await?;
    writer.until("the writer is unblocked", |seen| seen.stdout_text().contains("opened")).await?;
    cluster.end().await
}
