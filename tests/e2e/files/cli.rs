//! `codelia cp` and `codelia ls`.

use std::fs;

use anyhow::{Context, Result};
use codelia_proto::v1::CreateSessionRequest;
use codelia_tests::{Client, Cluster, Process, ProcessOutput};

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
