//! `codelia cp -r`, `ls -R`, `cat`, `rm`, `mkdir` and `mv`.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    pin::Pin,
};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    self, CreateSessionRequest, File, FileKind, ListFilesRequest, ListFilesResponse,
    ReadFileRequest, ReadFileResponse, StatFileRequest, StatFileResponse,
    file_service_server::{FileService, FileServiceServer},
    read_file_response,
};
use codelia_tests::{Client, Cluster, Process, ProcessOutput, Program, Scratch, Screen, Terminal};
use serde_json::Value;
use tokio_stream::{Stream, wrappers::TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

async fn installation() -> Result<(Cluster, Client, String)> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    Ok((cluster, client, session.name))
}

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path in UTF-8")
}

fn mode(path: &Path) -> Result<u32> {
    Ok(fs::symlink_metadata(path)?.permissions().mode() & 0o777)
}

#[tokio::test]
async fn directory_round_trips_without_links() -> Result<()> {
    let (cluster, client, session) = installation().await?;
    let from = cluster.directory().join("tree");
    fs::create_dir_all(from.join("sub/deep"))?;
    fs::create_dir(from.join("empty"))?;
    fs::write(from.join("sub/deep/large"), vec![b'x'; 3 << 20])?;
    fs::write(from.join("none"), "")?;
    fs::write(from.join("tool"), "#!/bin/sh\n")?;
    fs::set_permissions(from.join("tool"), fs::Permissions::from_mode(0o755))?;
    symlink("/etc", from.join("link"))?;

    let done = codelia(&cluster, &client, &["cp", "-r", text(&from)?, "work:"]).await?;
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
    assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
    assert!(done.stderr.contains("tree/link: a link or special file"), "{done:?}");
    let listed = codelia(&cluster, &client, &["ls", "-R", "--json", "work:tree"]).await?;
    let listed: Value = serde_json::from_str(&listed.stdout)?;
    let paths: Vec<_> =
        listed.as_array().into_iter().flatten().map(|file| file["path"].clone()).collect();
    let expected = ["empty", "none", "sub", "sub/deep", "sub/deep/large", "tool"];
    assert_eq!(paths, expected.map(|path| format!("tree/{path}")));
    let table = codelia(&cluster, &client, &["ls", "-R", "work:tree"]).await?;
    assert!(
        table.stdout.contains("  sub/deep/large\n") && table.stdout.contains("  empty/\n"),
        "{table:?}"
    );

    client.exec(&session, "ln -s /etc tree/link; ln -s .. tree/sub/loop; mkfifo tree/fifo").await?;
    // Under a new name, and then into a directory that exists.
    let back = cluster.directory().join("back");
    for root in [back.clone(), back.join("tree")] {
        let done = codelia(&cluster, &client, &["cp", "-r", "work:tree", text(&back)?]).await?;
        assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""), "{done:?}");
        assert_eq!(done.stderr.lines().count(), 3, "{done:?}");
        assert_eq!(fs::read(root.join("sub/deep/large"))?, fs::read(from.join("sub/deep/large"))?);
        assert_eq!((mode(&root.join("tool"))?, mode(&root.join("none"))?), (0o755, 0o644));
        assert!(
            root.join("empty").is_dir()
                && !root.join("link").is_symlink()
                && !root.join("fifo").exists()
        );
    }
    cluster.end().await
}

#[tokio::test]
async fn download_never_leaves_or_replaces_silently() -> Result<()> {
    let (cluster, client, session) = installation().await?;
    let plant = "mkdir -p t/sub t/other; echo evil > t/sub/file; echo evil > t/kept; echo evil > t/new;
        echo evil > t/through; echo evil > \"t/$(printf '\\033]0;owned\\007')\"; ln -s x \"t/$(printf 'l\\033[2J')\"";
    client.exec(&session, plant).await?;
    let home = cluster.directory().join("home");
    let victim = cluster.directory().join("victim");
    fs::create_dir_all(home.join("t"))?;
    fs::create_dir(&victim)?;
    fs::write(victim.join("file"), "mine")?;
    fs::write(home.join("t/kept"), "mine")?;
    symlink(&victim, home.join("t/sub"))?;
    symlink(victim.join("file"), home.join("t/through"))?;
    let into = text(&home)?;
    for force in [false, true] {
        let mut arguments = vec!["cp", "-r", "work:t", into];
        arguments.extend(force.then_some("--force"));
        let done = Screen::of(&cluster.cli(&client, &arguments), 200).await?;
        assert_eq!(done.code, Some(1), "{done:?}");
        let shown = done.lines.join("\n");
        assert!(shown.contains("t/sub") && shown.contains("links are not followed"), "{shown}");
        assert!(shown.contains("l\\u001b[2J: a link") && !shown.contains("\u{1b}[2J"), "{shown:?}");
        assert_eq!(shown.contains("exists (replace it with --force)"), !force, "{shown}");
        assert_eq!(fs::read_to_string(victim.join("file"))?, "mine");
        assert_eq!(fs::read_dir(&victim)?.count(), 1, "nothing is written through a link");
        let kept = fs::read_to_string(home.join("t/kept"))?;
        assert_eq!(kept, if force { "evil\n" } else { "mine" });
        assert_eq!(home.join("t/through").is_symlink(), !force, "a link itself is replaced");
        assert_eq!(fs::read_to_string(home.join("t/new"))?, "evil\n", "other files are copied");
    }
    cluster.end().await
}

#[tokio::test]
async fn several_sources_need_a_directory() -> Result<()> {
    let (cluster, client, _) = installation().await?;
    let directory = cluster.directory();
    for name in ["a", "b"] {
        fs::write(directory.join(name), name)?;
    }
    let (a, b, absent) = (directory.join("a"), directory.join("b"), directory.join("absent"));
    let (a, b, absent) = (text(&a)?, text(&b)?, text(&absent)?);
    for (arguments, code, message) in [
        (vec!["cp", a, b, "work:new"], 1, "not a directory"),
        (vec!["mkdir", "work:dir", "work:other"], 0, ""),
        (vec!["cp", a, absent, b, "work:dir"], 1, "cannot read"),
        (vec!["cp", "work:dir/a", "work:dir/b", a], 1, "not a directory"),
        (vec!["cp", "work:dir", "."], 1, "copy it with -r"),
        (vec!["cp", "-r", a, "work:dir", "work:"], 1, "exactly one of source and destination"),
    ] {
        let done = codelia(&cluster, &client, &arguments).await?;
        assert_eq!(done.code, Some(code), "{arguments:?}: {done:?}");
        assert!(done.stderr.contains(message), "{arguments:?}: {done:?}");
    }
    let done =
        codelia(&cluster, &client, &["cat", "work:dir/a", "work:dir/none", "work:dir/b"]).await?;
    assert_eq!((done.code, done.stdout.as_str()), (Some(1), "ab"), "{done:?}");
    assert!(done.stderr.contains("work:dir/none: no such file"), "{done:?}");
    cluster.end().await
}

#[tokio::test]
async fn files_are_made_moved_and_removed() -> Result<()> {
    let (cluster, client, session) = installation().await?;
    client.put(&session, "a", "one").await?;
    for (arguments, code, message) in [
        (vec!["mkdir", "work:x/y"], 1, "work:x/y"),
        (vec!["mkdir", "-p", "work:x/y", "work:x/y"], 0, ""),
        (vec!["mv", "work:a", "work:x/y"], 0, ""),
        (vec!["mv", "work:x/y/a", "work:b"], 0, ""),
        (vec!["mv", "work:absent", "work:c"], 1, "no such file"),
        (vec!["rm", "work:absent", "work:x", "work:b"], 1, "work:absent: no such file"),
        (vec!["cat", "work:b"], 1, "work:b: no such file"),
        (vec!["rm", "-f", "work:absent"], 0, ""),
        (vec!["rm", "-r", "work:x"], 0, ""),
        (vec!["rm", "local"], 2, "expected SESSION:PATH"),
    ] {
        let done = codelia(&cluster, &client, &arguments).await?;
        assert_eq!(done.code, Some(code), "{arguments:?}: {done:?}");
        assert!(done.stderr.contains(message), "{arguments:?}: {done:?}");
    }
    assert_eq!(codelia(&cluster, &client, &["ls", "--json", "work"]).await?.stdout, "[]\n");
    cluster.end().await
}

#[tokio::test]
async fn progress_is_shown_only_on_terminals() -> Result<()> {
    let (cluster, client, _) = installation().await?;
    let from = cluster.directory().join("large");
    fs::write(&from, vec![b'x'; 8 << 20])?;
    let arguments = ["cp", text(&from)?, "work:"];
    let mut terminal = Terminal::start(&cluster.cli(&client, &arguments), 100, 30)?;
    terminal.shows("8.00 MiB").await?;
    assert!(terminal.exited().await?.success());
    let piped = codelia(&cluster, &client, &arguments).await?;
    assert_eq!((piped.code, piped.stdout.as_str(), piped.stderr.as_str()), (Some(0), "", ""));
    cluster.end().await
}

/// A server whose listings name files outside the requested directory, and lie about sizes.
#[derive(Debug)]
struct HostileServer;

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl FileService for HostileServer {
    type ReadFileStream = Pin<Box<dyn Stream<Item = Result<ReadFileResponse, Status>> + Send>>;
    type ExportFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::ExportFilesResponse, Status>> + Send>>;
    type WatchFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::WatchFilesResponse, Status>> + Send>>;

    async fn list_files(&self, request: Request<ListFilesRequest>) -> Answer<ListFilesResponse> {
        let file = |path: &str, kind: FileKind| File {
            path: path.to_owned(),
            kind: kind.into(),
            size_bytes: 5,
            mode: 0o6777,
            ..File::default()
        };
        let files = match request.into_inner().path.as_str() {
            "t" => vec![
                file("t/..", FileKind::Directory),
                file("..", FileKind::Regular),
                file("../../outside", FileKind::Regular),
                file("/tmp/absolute", FileKind::Regular),
                file("t/\u{fffd}", FileKind::Regular),
                file("t/large", FileKind::Regular),
                file("", FileKind::Regular),
            ],
            other => return Err(Status::invalid_argument(format!("requested {other}"))),
        };
        Ok(Response::new(ListFilesResponse { files, next_page_token: String::new() }))
    }

    async fn read_file(&self, request: Request<ReadFileRequest>) -> Answer<Self::ReadFileStream> {
        let is_large = request.into_inner().path == "t/large";
        let data = if is_large { vec![b'x'; 6] } else { b"evil\n".to_vec() };
        let file = File {
            path: "../../elsewhere".into(),
            size_bytes: 1 << 40,
            mode: 0o6777,
            ..File::default()
        };
        let kinds =
            [read_file_response::Kind::File(file), read_file_response::Kind::Data(data.into())];
        let messages = kinds.map(|kind| Ok(ReadFileResponse { kind: Some(kind) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
    }

    async fn stat_file(&self, _: Request<StatFileRequest>) -> Answer<StatFileResponse> {
        let file = File { path: "t".into(), kind: FileKind::Directory.into(), ..File::default() };
        Ok(Response::new(StatFileResponse { file: Some(file) }))
    }

    async fn write_file(
        &self,
        _: Request<Streaming<v1::WriteFileRequest>>,
    ) -> Answer<v1::WriteFileResponse> {
        Err(Status::unimplemented("write"))
    }

    async fn make_directory(
        &self,
        _: Request<v1::MakeDirectoryRequest>,
    ) -> Answer<v1::MakeDirectoryResponse> {
        Err(Status::unimplemented("make"))
    }

    async fn move_file(&self, _: Request<v1::MoveFileRequest>) -> Answer<v1::MoveFileResponse> {
        Err(Status::unimplemented("move"))
    }

    async fn copy_file(&self, _: Request<v1::CopyFileRequest>) -> Answer<v1::CopyFileResponse> {
        Err(Status::unimplemented("copy"))
    }

    async fn remove_file(
        &self,
        _: Request<v1::RemoveFileRequest>,
    ) -> Answer<v1::RemoveFileResponse> {
        Err(Status::unimplemented("remove"))
    }

    async fn edit_file(&self, _: Request<v1::EditFileRequest>) -> Answer<v1::EditFileResponse> {
        Err(Status::unimplemented("edit"))
    }

    async fn export_files(
        &self,
        _: Request<v1::ExportFilesRequest>,
    ) -> Answer<Self::ExportFilesStream> {
        Err(Status::unimplemented("export"))
    }

    async fn watch_files(
        &self,
        _: Request<v1::WatchFilesRequest>,
    ) -> Answer<Self::WatchFilesStream> {
        Err(Status::unimplemented("watch"))
    }

    async fn import_files(
        &self,
        _: Request<Streaming<v1::ImportFilesRequest>>,
    ) -> Answer<v1::ImportFilesResponse> {
        Err(Status::unimplemented("import"))
    }
}

#[tokio::test]
async fn hostile_server_names_stay_in_destination() -> Result<()> {
    let scratch = Scratch::new()?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let served = tonic::transport::Server::builder()
        .add_service(FileServiceServer::new(HostileServer))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let into = scratch.join("a/b/into");
    fs::create_dir_all(&into)?;
    let mut command = Program::find()?.command();
    command
        .args(["cp", "-r", "--force", "work:t", text(&into)?])
        .env("CODELIA_DATA_DIR", scratch.path())
        .env("CODELIA_ENDPOINT", endpoint)
        .env("CODELIA_API_KEY", "cdl_x");
    let done = tokio::select! {
        done = Process::finish(command, b"") => done?,
        served = served => anyhow::bail!("the server ended: {served:?}"),
    };
    assert_eq!(done.code, Some(1), "{done:?}");
    assert_eq!(done.stderr.matches("the file name is not valid").count(), 4, "{done:?}");
    assert!(done.stderr.contains("work:t/large: the file grew during the copy"), "{done:?}");
    let names = |directory: &Path| -> Result<Vec<String>> {
        let entries = fs::read_dir(directory)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names = entries.collect::<Result<Vec<_>>>()?;
        names.sort();
        Ok(names)
    };
    assert_eq!(
        names(&into.join("t"))?,
        ["absolute", "outside"],
        "only the last part of a path is used"
    );
    assert_eq!(mode(&into.join("t/outside"))? & 0o7000, 0);
    for (directory, only) in
        [(scratch.join("a"), "b"), (scratch.join("a/b"), "into"), (into.clone(), "t")]
    {
        assert_eq!(names(&directory)?, [only], "{}", directory.display());
    }
    Ok(())
}
