//! File calls in a session whose files are limited: refused before the limit is exceeded, with
//! nothing left behind.

use std::{fs, time::Instant};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::*;
use codelia_tests::{Client, Cluster, eventually, refusal};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::{archive_bytes::Archive, workspace::Workspace};
use crate::isolation::isolating;

const MIB: usize = 1 << 20;

async fn limited(cluster: &Cluster, disk_bytes: i64, inodes: i64) -> Result<(Client, String)> {
    let client = cluster.tenant("a").await?;
    let limits = Limits { disk_bytes: Some(disk_bytes), inodes: Some(inodes), ..Limits::default() };
    let session =
        client.create(CreateSessionRequest { limits: Some(limits), ..Default::default() }).await?;
    Ok((client, session.name))
}

fn is_full(result: &Result<impl Sized, Status>, limit: &str) -> bool {
    let Err(status) = result else { return false };
    let found = refusal(status);
    let details = status.get_error_details();
    let named = details.error_info().and_then(|info| info.metadata.get("limit").cloned());
    found.code == Code::ResourceExhausted
        && found.reason == "SESSION_DISK_FULL"
        && named.as_deref() == Some(limit)
        && status.message().contains("remove files, or create a session with a higher")
}

fn open(session: &str, path: &str) -> WriteFileOpen {
    WriteFileOpen { parent: session.into(), path: path.into(), ..Default::default() }
}

#[tokio::test]
async fn uploads_and_copies_stay_within_disk_limit() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let (client, session) = limited(&cluster, 16 << 20, 200).await?;
    let workspace = Workspace::new(&client, &session);
    let content = vec![b'x'; 10 * MIB];
    client.write_file(open(&session, "one"), &content).await?;
    let refused = client.write_file(open(&session, "two"), &content).await;
    ensure!(is_full(&refused, "limits.disk_bytes"), "{refused:?}");
    let refused = workspace.copy("one", "copy", false).await;
    ensure!(is_full(&refused, "limits.disk_bytes"), "{refused:?}");
    ensure!(workspace.list("", 0).await?.concat() == ["one"]);
    // What was refused uses nothing, and what is removed makes room at once.
    client.write_file(open(&session, "small"), &content[..4 * MIB]).await?;
    workspace.remove("one", false).await?;
    client.write_file(open(&session, "two"), &content).await?;
    // The same for what a command removes.
    client.exec(&session, "rm two").await?;
    client.write_file(open(&session, "three"), &content).await?;
    cluster.end().await
}

#[tokio::test]
async fn imports_and_directories_stay_within_inode_limit() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let (client, session) = limited(&cluster, 16 << 20, 200).await?;
    let workspace = Workspace::new(&client, &session);
    let archive = |files: usize| {
        let add = |archive: Archive, number: usize| archive.file(&format!("d/{number}"), "x");
        (0..files).fold(Archive::default(), add).finish()
    };
    let refused = workspace.import("tree", &archive(300), false).await;
    ensure!(is_full(&refused, "limits.inodes"), "{refused:?}");
    let status = refused.err().context("refused")?;
    ensure!(status.message().ends_with("; nothing was imported"), "{status:?}");
    ensure!(workspace.list("", 0).await?.concat().is_empty());
    let above = cluster.session_directories()?.pop().context("a session")?;
    let imports = above.with_file_name("workspace.imports");
    let is_empty = || async { (fs::read_dir(&imports).ok()?.count() == 0).then_some(()) };
    eventually("the import is removed", is_empty).await;
    // The control: what fits is imported, also right after.
    workspace.import("tree", &archive(150), false).await?;
    // One more for each of these, until the session is full.
    let mut made = 0;
    let refused = loop {
        match workspace.make_directory(&format!("new{made}"), false).await {
            Ok(()) => made += 1,
            refused => break refused,
        }
    };
    ensure!(is_full(&refused, "limits.inodes") && (20..=50).contains(&made), "{made} {refused:?}");
    cluster.end().await
}

#[tokio::test]
async fn import_of_many_files_is_not_slowed_down() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let (client, session) = limited(&cluster, 4 << 30, 100_000).await?;
    let workspace = Workspace::new(&client, &session);
    let add = |archive: Archive, number: usize| archive.file(&format!("{number}"), "x");
    let archive = (0..20_000).fold(Archive::default(), add).finish();
    let began = Instant::now();
    let imported = workspace.import("tree", &archive, false).await?;
    println!("20000 files imported in {:?}", began.elapsed());
    ensure!(imported.entries == 20_000);
    cluster.end().await
}
