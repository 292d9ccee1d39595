//! Interrupted uploads leave nothing behind.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use codelia_proto::v1::*;
use codelia_tests::{Client, Cluster, ClusterOptions, SmallDisk, eventually, within};
use rustix::process::Signal;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::workspace::{Workspace, bytes, directory, open, outcome, refused};
use crate::isolation::isolating;

/// Returns the sizes of unnamed files in session directories that a process has open.
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

/// An upload that is not finished.
struct HalfUpload {
    pieces: mpsc::Sender<WriteFileRequest>,
    call: JoinSet<Result<(), Status>>,
}

/// Starts an upload and returns when its first megabyte is on the worker's disk.
async fn half_uploaded(cluster: &Cluster, client: &Client, session: &str) -> Result<HalfUpload> {
    let (pieces, messages) = mpsc::channel(4);
    let send = |kind| pieces.try_send(WriteFileRequest { kind: Some(kind) });
    send(write_file_request::Kind::Open(open(session, "upload")))?;
    send(write_file_request::Kind::Data(vec![1; 1 << 20].into()))?;
    let mut files = client.files();
    let mut call = JoinSet::new();
    call.spawn(async move { files.write_file(ReceiverStream::new(messages)).await.map(drop) });
    let pid = cluster.workers[0].process.pid();
    let arrived = || async { unnamed_files(pid).contains(&(1 << 20)).then_some(()) };
    eventually("the first megabyte is on disk", arrived).await;
    Ok(HalfUpload { pieces, call })
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
    let answer =
        within("the caller gets an answer", half.call.join_next()).await.context("an answer")??;
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
    assert_eq!(Workspace::new(&client, &session.name).list("", 0).await?, [["before"]]);
    client.put(&session.name, "upload", "whole").await?;
    cluster.end().await
}

#[tokio::test]
async fn aborted_upload_leaves_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.put(&session.name, "upload", "before").await?;
    // A separate connection, which is dropped.
    let leaving = Client::connect(&client.endpoint, &client.secret).await?;
    let half = half_uploaded(&cluster, &leaving, &session.name).await?;
    drop(half.call);
    drop(leaving);
    let pid = cluster.workers[0].process.pid();
    eventually("the worker closes the file", || async {
        unnamed_files(pid).is_empty().then_some(())
    })
    .await;
    drop(half.pieces);
    assert_eq!(client.get(&session.name, "upload").await?, "before");
    assert_eq!(Workspace::new(&client, &session.name).list("", 0).await?, [["upload"]]);
    cluster.end().await
}

#[tokio::test]
async fn full_disk_is_reported_and_old_file_stays() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let Some(disk) = SmallDisk::in_memory(&cluster.directory().join("disk"))? else {
        return cluster.end().await;
    };
    let root = disk.path().join("root").display().to_string();
    cluster.add_worker_with(&[("CODELIA_SANDBOX_ROOT", root.as_str())]).await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    client.put(&name, "file", "before").await?;
    let full = refused(Code::ResourceExhausted, "DISK_FULL");
    assert_eq!(outcome(client.write_file(open(&name, "file"), &bytes(16 << 20)).await), full);
    assert_eq!(client.get(&name, "file").await?, "before");
    client
        .write_file(open(&name, "file"), &bytes(1 << 20))
        .await
        .context("space is freed after the refused upload")?;
    cluster.stop_processes().await?;
    drop(disk);
    cluster.end().await
}

/// Half of the disk is reserved for root. A session's uploads and copies do not get it.
#[tokio::test]
async fn uploads_leave_blocks_reserved_for_root() -> Result<()> {
    let Some(mut cluster) = isolating("bwrap", 0).await? else { return Ok(()) };
    let Some(disk) = SmallDisk::ext4(&cluster.directory().join("disk"), 16 << 20, 50)? else {
        return cluster.end().await;
    };
    let root = disk.path().join("root");
    let content = bytes(8 << 20);
    fs::write(disk.path().join("of-root"), &content)
        .context("the control: root gets the reserved blocks")?;
    fs::remove_file(disk.path().join("of-root"))?;
    cluster.add_worker_with(&[("CODELIA_SANDBOX_ROOT", &root.display().to_string())]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let name = &session.name;
    let full = refused(Code::ResourceExhausted, "DISK_FULL");
    client.put(name, "file", "before").await?;
    for path in ["file", "new"] {
        assert_eq!(outcome(client.write_file(open(name, path), &content).await), full, "{path}");
    }
    client.write_file(open(name, "half"), &content[..3 << 20]).await?;
    let workspace = Workspace::new(&client, name);
    assert_eq!(outcome(workspace.copy("half", "other-half", false).await), full);
    assert_eq!(client.get(name, "file").await?, "before");
    let command = client.exec(name, "head -c 8M /dev/zero > by-command || echo full").await?;
    assert_eq!(command.stdout_text(), "full\n", "a command does not get them either");
    cluster.stop_processes().await?;
    drop(disk);
    cluster.end().await
}
