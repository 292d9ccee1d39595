//! Reading, writing and editing the content of files.

use std::fs;

use anyhow::Result;
use codelia_proto::v1::*;
use codelia_tests::{Cluster, within};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use super::workspace::{Workspace, bytes, open, outcome, read, refused};

#[tokio::test]
async fn large_file_round_trips_byte_for_byte() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let content = bytes(10_000_000);
    let request = WriteFileOpen { mode: Some(0o750), ..open(&session.name, "a.bin") };
    let written = client.write_file(request, &content).await?;
    assert_eq!(
        (written.size_bytes, written.mode, written.path.as_str()),
        (10_000_000, 0o750, "a.bin")
    );
    let (file, returned) = client.read_file(read(&session.name, "/workspace/a.bin")).await?;
    assert!(returned == content, "{} bytes returned", returned.len());
    assert_eq!(file, written);
    let sum =
        client.exec(&session.name, "sha256sum < a.bin; stat -c %a a.bin").await?.stdout_text();
    let expected: String =
        Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(sum, format!("{expected}  -\n750\n"));
    let part =
        ReadFileRequest { offset: 9_999_990, length: Some(4), ..read(&session.name, "a.bin") };
    assert_eq!(client.read_file(part).await?.1, content[9_999_990..9_999_994]);
    let past_end = ReadFileRequest { offset: 10_000_001, ..read(&session.name, "a.bin") };
    assert_eq!(client.read_file(past_end).await?.1, b"");
    // A replaced file keeps its permissions and gets a new etag.
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
        for _ in 0..128 {
            send(write_file_request::Kind::Data(piece.clone().into())).await?;
        }
        send(write_file_request::Kind::Finish(WriteFileFinish {})).await?;
        drop(pieces);
        Ok::<_, anyhow::Error>(())
    };
    let (written, fed) = tokio::join!(call, feed);
    fed?;
    assert_eq!(written?.into_inner().file.unwrap_or_default().size_bytes, 128 << 20);
    let mut stream = client.files().read_file(read(&session.name, "large")).await?.into_inner();
    let mut total = 0;
    while let Some(piece) = within("a piece", stream.message()).await? {
        if let Some(read_file_response::Kind::Data(data)) = piece.kind {
            total += data.len();
        }
    }
    assert_eq!(total, 128 << 20);
    for (pid, before) in pids.into_iter().zip(before) {
        let grown = peak_memory(pid) - before;
        assert!(grown < 32 << 10, "process {pid} grew by {grown} kB for a file of 131072 kB");
    }
    cluster.end().await
}

/// Returns the peak memory of a process in kB.
pub(super) fn peak_memory(pid: u32) -> i64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace()
        .nth(1)
        .and_then(|number| number.parse().ok())
        .expect("VmHWM in /proc/PID/status")
}

#[tokio::test]
async fn edit_replaces_unique_or_all_matches() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let workspace = Workspace::new(&client, &name);
    let written = client.put(&name, "text", "one two two").await?;
    assert_eq!(workspace.edit("one", "1", false).await?, 1);
    assert_eq!(
        outcome(workspace.edit("two", "2", false).await),
        refused(Code::FailedPrecondition, "TEXT_AMBIGUOUS")
    );
    assert_eq!(
        outcome(workspace.edit("absent", "x", true).await),
        refused(Code::FailedPrecondition, "TEXT_NOT_FOUND")
    );
    assert_eq!(workspace.edit("two", "2", true).await?, 2);
    assert_eq!(client.get(&name, "text").await?, "1 2 2");
    // A stale etag changes nothing.
    let stale = EditFileRequest {
        parent: name.clone(),
        path: "text".into(),
        old_text: "1".into(),
        etag: written.etag.clone(),
        ..Default::default()
    };
    assert_eq!(
        outcome(client.files().edit_file(stale.clone()).await),
        refused(Code::FailedPrecondition, "FILE_CHANGED")
    );
    let etag = workspace.stat("text").await?.etag;
    client.files().edit_file(EditFileRequest { etag, ..stale }).await?;
    assert_eq!(client.get(&name, "text").await?, " 2 2");
    let stale = WriteFileOpen { etag: written.etag, ..open(&name, "text") };
    assert_eq!(
        outcome(client.write_file(stale, b"x").await),
        refused(Code::FailedPrecondition, "FILE_CHANGED")
    );
    assert_eq!(workspace.list("", 0).await?, [["text"]], "no temporary file is left");
    cluster.end().await
}

#[tokio::test]
async fn edit_is_limited_before_its_result_is_built() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let workspace = Workspace::new(&client, &name);
    let text = "x".repeat(3000);
    client.put(&name, "text", &text).await?;
    let pid = cluster.workers[0].process.pid();
    let before = peak_memory(pid);
    let large = "y".repeat(1 << 20);
    assert_eq!(
        outcome(workspace.edit("x", &large, true).await),
        refused(Code::ResourceExhausted, "FILE_TOO_LARGE")
    );
    let grown = peak_memory(pid) - before;
    assert!(grown < 100_000, "the worker grew by {grown} kB; the result would have 3072000 kB");
    assert_eq!(client.get(&name, "text").await?, text);
    // The control: the largest result is written.
    client.put(&name, "text", &"x".repeat(15)).await?;
    assert_eq!(workspace.edit("x", &large, true).await?, 15);
    assert_eq!(workspace.stat("text").await?.size_bytes, 15 << 20);
    // Nearly matches at every position.
    let almost = format!("{}x", "y".repeat((1 << 20) - 1));
    assert_eq!(
        outcome(workspace.edit(&almost, "z", true).await),
        refused(Code::FailedPrecondition, "TEXT_NOT_FOUND")
    );
    cluster.end().await
}
