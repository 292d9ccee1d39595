//! `ExportFiles` and `ImportFiles`: what is packed and unpacked, and what a failure leaves.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::*;
use codelia_tests::{Client, Cluster, Process, eventually, within};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use tonic_types::StatusExt;

use super::{
    archive_bytes::Archive,
    content::peak_memory,
    workspace::{Isolated, Workspace, directory, outcome, refused},
};

/// Prints every file below the current directory: path, kind, mode, size, target and content.
const INVENTORY: &str =
    "find . -mindepth 1 -printf '%P %y %m %s %l\\n' | sed 's/ d \\([0-9]*\\) [0-9]* / d \\1 /' | sort;
    find . -type f -exec sha256sum {} + | sort";

const PLANT: &str = "set -e; umask 022; mkdir -p tree/empty tree/sub; cd tree; echo text > sub/file; touch none
    printf 'x%.0s' $(seq 20000) > sub/large; ln -s sub/file link; ln -s nowhere dangling
    echo tool > tool; chmod 755 tool; chmod 600 sub/large; ln sub/file sub/second; truncate -s 30M sparse
    touch \"$(printf 'new\\nline')\" \"$(printf 'esc\\033[2J')\" \"$(printf 'bytes\\377')\" \"$(printf 'n%.0s' $(seq 255))\"
    deep=$(printf 'dir/%.0s' $(seq 90)); mkdir -p \"$deep\"; echo deep > \"$deep/file\"
    ln -s \"$(printf 'l%.0s' $(seq 200))\" long-link; echo done";

/// Unpacks an archive with the host's own `tar`.
fn untar(archive: &[u8], into: &Path) -> Result<()> {
    fs::create_dir_all(into)?;
    fs::write(into.with_extension("tar"), archive)?;
    let done = Command::new("tar")
        .arg("xf")
        .arg(into.with_extension("tar"))
        .arg("-C")
        .arg(into)
        .output()?;
    ensure!(done.status.success(), "tar: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

#[tokio::test]
async fn archive_round_trips_with_links_and_names() -> Result<()> {
    let Some(Isolated { cluster, client, session, .. }) = Isolated::start().await? else {
        return Ok(());
    };
    let name = &session.name;
    let workspace = Workspace::new(&client, name);
    assert_eq!(client.exec(name, PLANT).await?.stdout_text(), "done\n");
    let inventory = async |path: &str| -> Result<String> {
        Ok(client.exec(name, &format!("cd {path} && {INVENTORY}")).await?.stdout_text())
    };
    let expected = inventory("tree").await?;
    assert!(expected.lines().count() > 100, "{expected}");
    for (format, copy) in [(ArchiveFormat::Tar, "plain"), (ArchiveFormat::TarZstd, "compressed")] {
        let (archive, summary) = workspace.export("tree", format).await?;
        assert_eq!((summary.skipped_count, summary.entries), (0, 106), "{summary:?}");
        assert_eq!(
            archive.len() < 1 << 20,
            format == ArchiveFormat::TarZstd,
            "{} bytes",
            archive.len()
        );
        let imported = workspace.import(copy, &archive, false).await?;
        assert_eq!(
            (imported.entries, imported.content_bytes),
            (summary.entries, summary.content_bytes)
        );
        assert_eq!(inventory(copy).await?, expected, "{copy}");
        let owners =
            client.exec(name, &format!("find {copy} ! -user \"$(id -u)\" | wc -l")).await?;
        assert_eq!(owners.stdout_text(), "0\n");
    }
    // The host's own tar reads what was exported, and what it packs can be imported.
    let (archive, _) = workspace.export("tree", ArchiveFormat::Unspecified).await?;
    let unpacked = cluster.directory().join("unpacked");
    untar(&archive, &unpacked)?;
    for flavour in ["gnu", "pax", "ustar"] {
        let mut pack = Command::new("tar");
        // The format of 1988 has no room for the longest names.
        let leave = if flavour == "ustar" { "--exclude=*dir*" } else { "--exclude=nothing" };
        pack.args([
            "--exclude=nnnn*",
            leave,
            "--exclude=long-link",
            "--sort=name",
            "--format",
            flavour,
            "-C",
        ]);
        let packed = pack.arg(&unpacked).args(["-c", "."]).output()?;
        ensure!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
        workspace.import(flavour, &packed.stdout, false).await?;
        let copied =
            client.exec(name, &format!("cd {flavour}; cat sub/second tool; readlink link")).await?;
        assert_eq!(copied.stdout_text(), "text\ntool\nsub/file\n", "{flavour}");
    }
    cluster.end().await
}

#[tokio::test]
async fn export_reports_what_it_leaves_out() -> Result<()> {
    let Some(Isolated { cluster, client, session, .. }) = Isolated::start().await? else {
        return Ok(());
    };
    let name = &session.name;
    let workspace = Workspace::new(&client, name);
    let deep = "mkdir -p t/closed t/open; cd t; echo secret > closed/f; echo x > denied; chmod 0 denied closed; mkfifo fifo
        cd open; for i in $(seq 105); do mkdir d; cd d; done; echo made";
    assert_eq!(client.exec(name, deep).await?.stdout_text(), "made\n");
    let (archive, summary) = workspace.export("t", ArchiveFormat::Tar).await?;
    let mut skipped: Vec<_> =
        summary.skipped.iter().map(|file| (file.path.split('/').count(), file.reason())).collect();
    skipped.sort_by_key(|(levels, reason)| (*levels, i32::from(*reason)));
    let permission = SkipReason::Permission;
    let expected =
        [(1, SkipReason::Special), (1, permission), (1, permission), (100, SkipReason::TooDeep)];
    assert_eq!(skipped, expected, "{summary:?}");
    assert_eq!(summary.skipped_count, 4);
    assert!(!archive.windows(6).any(|bytes| bytes == b"secret"));
    for (path, reason) in [("absent", "FILE_NOT_FOUND"), ("inside", "NOT_A_DIRECTORY")] {
        let answer = workspace.export(path, ArchiveFormat::Tar).await.map(drop);
        assert_eq!(outcome(answer).1, reason);
    }
    cluster.end().await
}

/// The member at fault and how many entries remain, from a refusal.
fn progress(status: &Status) -> Result<(String, String)> {
    let info = status.get_details_error_info().context("ErrorInfo")?;
    let get = |key: &str| info.metadata.get(key).cloned().unwrap_or_default();
    Ok((get("member"), get("imported_entries")))
}

#[tokio::test]
async fn failed_import_leaves_nothing_or_says_what() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let workspace = Workspace::new(&client, &session.name);
    let bad = Archive::default().file("a", "1").file("b/c", "2").file("../evil", "3").finish();
    // The control: the members before it can be imported.
    let good = Archive::default().file("a", "1").file("b/c", "2").finish();
    assert_eq!(workspace.import("good", &good, false).await?.entries, 2);
    assert_eq!(
        workspace.list_levels("good", 0, 9).await?.concat(),
        ["good/a", "good/b", "good/b/c"]
    );
    // A directory that does not exist appears as a whole or not at all.
    let status = workspace.import("new", &bad, false).await.err().context("a refusal")?;
    assert_eq!(progress(&status)?, ("../evil".into(), "0".into()));
    assert!(status.message().contains("nothing was imported"), "{status:?}");
    let truncated = Archive::default().file("a", "1").unfinished();
    let invalid = refused(Code::InvalidArgument, "ARCHIVE_INVALID");
    for archive in [&truncated[..], b"", b"not an archive", &vec![b'x'; 5000]] {
        assert_eq!(outcome(workspace.import("new", archive, false).await), invalid);
    }
    assert_eq!(outcome(workspace.stat("new").await).0, Code::NotFound);
    // In one that exists, what was complete remains.
    workspace.make_directory("old", false).await?;
    let status = workspace.import("old", &bad, false).await.err().context("a refusal")?;
    assert_eq!(progress(&status)?, ("../evil".into(), "2".into()));
    assert_eq!(workspace.list_levels("old", 0, 9).await?.concat(), ["old/a", "old/b", "old/b/c"]);
    let again = Archive::default().file("z", "new").file("a", "new").finish();
    let status = workspace.import("old", &again, false).await.err().context("a refusal")?;
    assert_eq!(
        (outcome::<()>(Err(status.clone())).1, progress(&status)?),
        ("FILE_EXISTS".into(), ("a".into(), "1".into()))
    );
    assert_eq!(client.get(&session.name, "old/a").await?, "1");
    workspace.import("old", &again, true).await?;
    assert_eq!(client.get(&session.name, "old/a").await?, "new");
    assert_eq!(outcome(workspace.import("old/a", &again, true).await).1, "NOT_A_DIRECTORY");
    assert_eq!(outcome(workspace.import("no/parent", &again, true).await).1, "FILE_NOT_FOUND");
    // Bits that give rights are dropped.
    let mode = fs::metadata(directory(&cluster, &session)?.join("old/z"))?.permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
    let above =
        directory(&cluster, &session)?.parent().context("a parent")?.join("workspace.imports");
    let trash = cluster.workers[0].root.join("trash");
    eventually("nothing is left of failed imports", || async {
        let count = |path: &Path| fs::read_dir(path).map_or(0, Iterator::count);
        (count(&above) + count(&trash) == 0).then_some(())
    })
    .await;
    cluster.end().await
}

#[tokio::test]
async fn abandoned_import_is_removed() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let workspace = Workspace::new(&client, &session.name);
    client.put(&session.name, "warm", "up").await?;
    let imports =
        directory(&cluster, &session)?.parent().context("a parent")?.join("workspace.imports");
    let staged = || async { fs::read_dir(&imports).map_or(0, Iterator::count) };
    let (pieces, messages) = mpsc::channel(4);
    let open =
        ImportFilesOpen { parent: session.name.clone(), path: "new".into(), overwrite: false };
    pieces.send(ImportFilesRequest { kind: Some(import_files_request::Kind::Open(open)) }).await?;
    let part = Archive::default().file("a", "1").unfinished();
    pieces
        .send(ImportFilesRequest { kind: Some(import_files_request::Kind::Data(part.into())) })
        .await?;
    let mut files = client.files();
    {
        let mut call = std::pin::pin!(files.import_files(ReceiverStream::new(messages)));
        let begun =
            eventually("the import has begun", || async { (staged().await > 0).then_some(()) });
        tokio::select! {
            answer = &mut call => anyhow::bail!("an early answer: {answer:?}"),
            () = begun => {}
        }
    }
    drop(pieces);
    eventually("the import is removed", || async { (staged().await == 0).then_some(()) }).await;
    assert_eq!(outcome(workspace.stat("new").await).0, Code::NotFound);
    cluster.end().await
}

/// Sends an export of one directory to an import into another.
async fn pipe(
    client: &Client,
    session: &str,
    from: &str,
    to: &str,
) -> Result<(ExportSummary, ImportFilesResponse)> {
    let request =
        ExportFilesRequest { parent: session.into(), path: from.into(), ..Default::default() };
    let mut stream = client.files().export_files(request).await?.into_inner();
    let (pieces, messages) = mpsc::channel(2);
    let send = async |kind| pieces.send(ImportFilesRequest { kind: Some(kind) }).await;
    let open = ImportFilesOpen { parent: session.into(), path: to.into(), overwrite: false };
    let mut files = client.files();
    let feed = async {
        let mut summary = ExportSummary::default();
        send(import_files_request::Kind::Open(open)).await?;
        while let Some(message) = within("a piece", stream.message()).await? {
            match message.kind {
                Some(export_files_response::Kind::Data(data)) => {
                    send(import_files_request::Kind::Data(data)).await?
                }
                Some(export_files_response::Kind::Summary(last)) => summary = last,
                None => {}
            }
        }
        send(import_files_request::Kind::Finish(ImportFilesFinish {})).await?;
        Ok::<_, anyhow::Error>(summary)
    };
    let (imported, summary) = tokio::join!(files.import_files(ReceiverStream::new(messages)), feed);
    Ok((summary?, imported?.into_inner()))
}

#[tokio::test]
async fn large_archive_is_streamed_not_buffered() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let made = "mkdir big; for i in 1 2 3 4; do head -c 32M /dev/urandom > big/$i; done; echo made";
    assert_eq!(client.exec(&name, made).await?.stdout_text(), "made\n");
    let pids = [cluster.workers[0].process.pid(), cluster.apis[0].process.pid()];
    let before = pids.map(peak_memory);
    let (summary, imported) = pipe(&client, &name, "big", "copy").await?;
    assert_eq!((summary.entries, summary.content_bytes), (4, 128 << 20));
    assert_eq!(imported.content_bytes, 128 << 20);
    for (pid, before) in pids.into_iter().zip(before) {
        let grown = peak_memory(pid) - before;
        assert!(grown < 32 << 10, "process {pid} grew by {grown} kB for an archive of 131072 kB");
    }
    let same = client.exec(&name, "diff -r big copy && echo same").await?;
    assert_eq!(same.stdout_text(), "same\n");
    cluster.end().await
}

#[tokio::test]
async fn cli_exports_imports_and_lists_levels() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    client
        .exec(&session.name, "mkdir -p t/a/b; echo one > t/a/b/c; ln -s a t/link; mkfifo t/fifo")
        .await?;
    let codelia =
        async |arguments: &[&str], input: &[u8]| -> Result<codelia_tests::ProcessOutput> {
            Process::finish(cluster.cli(&client, arguments), input).await
        };
    let file = cluster.directory().join("t.tar.zst");
    let file = file.to_str().context("a path in UTF-8")?;
    let done = codelia(&["export", "work:t", "-o", file], b"").await?;
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
    assert!(done.stderr.contains("skipped fifo: a special file"), "{done:?}");
    assert_eq!(fs::read(file)?[..4], [0x28, 0xb5, 0x2f, 0xfd]);
    let again = codelia(&["export", "work:t", "-o", file], b"").await?;
    assert!(again.code == Some(1) && again.stderr.contains("--force"), "{again:?}");
    let json = codelia(&["export", "--json", "--force", "work:t", "-o", file], b"").await?;
    let json: serde_json::Value = serde_json::from_str(&json.stdout)?;
    assert_eq!((&json["entries"], &json["skippedCount"]), (&"4".into(), &"1".into()));
    let done = codelia(&["import", file, "work:copy"], b"").await?;
    assert_eq!(
        (done.code, done.stdout.as_str(), done.stderr.as_str()),
        (Some(0), "", ""),
        "{done:?}"
    );
    assert_eq!(client.get(&session.name, "copy/link/b/c").await?, "one\n");
    let archive = Archive::default().file("x", "stdin").finish();
    let done = codelia(&["import", "--json", "-", "work:copy"], &archive).await?;
    assert_eq!(done.stdout, "{\"contentBytes\":\"5\",\"entries\":\"1\"}\n", "{done:?}");
    let taken = codelia(&["import", "-", "work:copy"], &archive).await?;
    assert!(taken.code == Some(1) && taken.stderr.contains("FILE_EXISTS"), "{taken:?}");
    let hostile = Archive::default().file("../\u{1b}[2J", "x").finish();
    let refused = codelia(&["import", "-", "work:copy"], &hostile).await?;
    assert!(refused.code == Some(1) && refused.stderr.contains("PATH_LEADS_OUT"), "{refused:?}");
    assert!(!refused.stderr.contains('\u{1b}'), "{refused:?}");
    let paths = async |arguments: &[&str]| -> Result<Vec<String>> {
        let listed: serde_json::Value =
            serde_json::from_str(&codelia(arguments, b"").await?.stdout)?;
        let paths = listed.as_array().into_iter().flatten();
        Ok(paths.filter_map(|file| Some(file["path"].as_str()?.to_owned())).collect())
    };
    let two = paths(&["ls", "--json", "-R", "--depth", "2", "work:copy"]).await?;
    assert_eq!(two, ["copy/a", "copy/a/b", "copy/link", "copy/x"]);
    let table = codelia(&["ls", "-R", "work:copy"], b"").await?;
    assert!(table.stdout.contains("  a/b/c\n"), "{table:?}");
    fs::write(cluster.directory().join("local"), "local")?;
    let local = cluster.directory().join("local");
    let copied =
        codelia(&["cp", local.to_str().context("UTF-8")?, "work:new/deep/file"], b"").await?;
    assert_eq!(copied.code, Some(0), "{copied:?}");
    assert_eq!(client.get(&session.name, "new/deep/file").await?, "local");
    cluster.end().await
}
