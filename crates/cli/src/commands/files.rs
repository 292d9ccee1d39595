//! `codelia cp` and `codelia ls`.

use std::{
    io::{ErrorKind, IsTerminal, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    pin::pin,
};

use anyhow::{Context, Result, bail, ensure};
use codelia_proto::v1::{
    File, FileKind, ListFilesRequest, ReadFileRequest, ReadFileResponse, StatFileRequest, WriteFileFinish,
    WriteFileOpen, WriteFileRequest, read_file_response, write_file_request::Kind,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use crate::{
    args::{self, CopyPath},
    client::{Client, pages},
    error_report::AboutFile,
    output::{Output, stdout_error},
    record, resolve,
    signals::Signals,
};

/// Bytes in one upload message.
const CHUNK_BYTES: usize = 256 * 1024;
/// Upload messages that may wait to be sent.
const QUEUE_SIZE: usize = 4;
/// Files requested per page.
const PAGE_SIZE: i32 = 1000;
/// Neither set-user-id, nor set-group-id, nor sticky.
const MODE_MASK: u32 = 0o777;
const NO_FILE: &str = "the server sent no file";

/// Copies a file to or from a session.
pub(crate) async fn cp(client: &Client, args: &args::Cp, output: Output) -> Result<()> {
    use CopyPath::{Local, Session, Stdio};
    let (file, session, path) = match (&args.source, &args.destination) {
        (Session { session, path }, to @ (Local(_) | Stdio)) => {
            let target = Target::new(to, path, args.force)?;
            (download(client, session, path, target).await, session, path)
        }
        (from @ (Local(_) | Stdio), Session { session, path }) => {
            (upload(client, from, session, path).await, session, path)
        }
        _ => bail!("exactly one of source and destination must be SESSION:PATH"),
    };
    let file = file.about_file(session, path)?;
    let to_stdout = args.destination == Stdio;
    if output.is_json() && !to_stdout { output.print(&to_json(&file), "") } else { Ok(()) }
}

async fn download(client: &Client, session: &str, path: &str, target: Target) -> Result<File> {
    let parent = resolve::session(client, session).await?;
    let request = ReadFileRequest { parent, path: path.to_owned(), ..Default::default() };
    let mut chunks = client.files().read_file(request).await?.into_inner();
    let first = chunks.message().await?.and_then(|chunk| chunk.kind);
    let Some(read_file_response::Kind::File(file)) = first else { bail!(NO_FILE) };
    let mut sink = target.open(file.mode.cast_unsigned())?;
    // Without a temporary file a signal may end the program at once, also while stdout is blocked.
    let mut signals = if matches!(sink, Sink::File(..)) { Some(Signals::catch()?) } else { None };
    let interrupted = async {
        match &mut signals {
            Some(signals) => drop(signals.next().await),
            None => std::future::pending().await,
        }
    };
    let bar = progress_bar(u64::try_from(file.size_bytes).ok());
    tokio::select! {
        copied = copy_chunks(&mut chunks, &mut sink, &bar) => copied?,
        () = interrupted => bail!("interrupted; nothing was written"),
    }
    bar.finish_and_clear();
    sink.finish()?;
    Ok(file)
}

async fn copy_chunks(
    chunks: &mut Streaming<ReadFileResponse>,
    sink: &mut Sink,
    bar: &ProgressBar,
) -> Result<()> {
    while let Some(chunk) = chunks.message().await? {
        if let Some(read_file_response::Kind::Data(data)) = chunk.kind {
            sink.write(&data)?;
            bar.inc(data.len() as u64);
        }
    }
    Ok(())
}

/// Destination of a download.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    Stdout,
    /// A local file, and whether it may replace another one.
    File(PathBuf, bool),
}

/// An open [`Target`].
enum Sink {
    Stdout,
    /// A temporary file in the directory of the target, renamed once complete.
    File(NamedTempFile, PathBuf, bool),
}

impl Target {
    /// The file in a directory has the name that the user wrote. The server's answer may name
    /// another one, such as the target of a link that a command has made.
    fn new(to: &CopyPath, requested: &str, force: bool) -> Result<Self> {
        let CopyPath::Local(path) = to else { return Ok(Self::Stdout) };
        if !path.is_dir() {
            return Ok(Self::File(path.clone(), force));
        }
        let name = Path::new(requested).file_name();
        let name = name.with_context(|| format!("{requested:?} has no file name: name the local file"))?;
        Ok(Self::File(path.join(name), force))
    }

    fn open(self, mode: u32) -> Result<Sink> {
        let Self::File(path, force) = self else { return Ok(Sink::Stdout) };
        check_replaceable(&path, force)?;
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // The umask applies.
        let permissions = std::fs::Permissions::from_mode(mode & MODE_MASK);
        let temporary = tempfile::Builder::new()
            .prefix(".codelia-")
            .permissions(permissions)
            .tempfile_in(directory)
            .with_context(|| format!("cannot write to {}", directory.display()))?;
        Ok(Sink::File(temporary, path, force))
    }
}

/// Fails if something has this name that must not be replaced. Does not follow a link.
fn check_replaceable(path: &Path, force: bool) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot write {}", path.display())),
        Ok(found) if !found.is_file() && !found.is_symlink() => {
            bail!("{} is not a regular file (write to stdout with -)", path.display())
        }
        Ok(_) if force => Ok(()),
        Ok(_) => bail!(exists(path)),
    }
}

fn exists(path: &Path) -> String {
    format!("{} exists (replace it with --force)", path.display())
}

impl Sink {
    fn write(&mut self, data: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => std::io::stdout().write_all(data).map_err(stdout_error),
            Self::File(file, path, _) => {
                file.write_all(data).with_context(|| format!("cannot write {}", path.display()))
            }
        }
    }

    fn finish(self) -> Result<()> {
        let (temporary, path, force) = match self {
            Self::Stdout => return std::io::stdout().flush().map_err(stdout_error),
            Self::File(temporary, path, force) => (temporary, path, force),
        };
        // Neither follows a link.
        let named = if force { temporary.persist(&path) } else { temporary.persist_noclobber(&path) };
        match named {
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => bail!(exists(&path)),
            named => named.map(drop).with_context(|| format!("cannot write {}", path.display())),
        }
    }
}

async fn upload(client: &Client, from: &CopyPath, session: &str, path: &str) -> Result<File> {
    let Source { mut bytes, name, mode, size } = Source::open(from).await?;
    let path = upload_path(path, name.as_deref())?;
    let mode = mode.map(u32::cast_signed);
    let parent = resolve::session(client, session).await?;
    let open = WriteFileOpen { parent, path, mode, ..WriteFileOpen::default() };
    let bar = progress_bar(size);
    let (requests, queue) = mpsc::channel(QUEUE_SIZE);
    let mut files = client.files();
    let mut call = pin!(files.write_file(ReceiverStream::new(queue)));
    let response = tokio::select! {
        // A response before everything was sent is an error.
        response = &mut call => response,
        sent = send_chunks(requests, open, &mut bytes, &bar) => {
            sent.context("cannot read the file")?;
            call.await
        }
    };
    bar.finish_and_clear();
    response?.into_inner().file.context(NO_FILE)
}

async fn send_chunks(
    requests: mpsc::Sender<WriteFileRequest>,
    open: WriteFileOpen,
    bytes: &mut Bytes,
    bar: &ProgressBar,
) -> std::io::Result<()> {
    // A closed queue means that the server has responded already.
    let send = async |kind| requests.send(WriteFileRequest { kind: Some(kind) }).await.is_ok();
    let mut is_open = send(Kind::Open(open)).await;
    while is_open {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        if (&mut *bytes).take(CHUNK_BYTES as u64).read_to_end(&mut chunk).await? == 0 {
            send(Kind::Finish(WriteFileFinish {})).await;
            break;
        }
        bar.inc(chunk.len() as u64);
        is_open = send(Kind::Data(chunk.into())).await;
    }
    Ok(())
}

type Bytes = Box<dyn tokio::io::AsyncRead + Send + Unpin>;

/// Source of an upload.
struct Source {
    bytes: Bytes,
    name: Option<String>,
    mode: Option<u32>,
    size: Option<u64>,
}

impl Source {
    async fn open(from: &CopyPath) -> Result<Self> {
        let CopyPath::Local(path) = from else {
            return Ok(Self { bytes: Box::new(tokio::io::stdin()), name: None, mode: None, size: None });
        };
        let cannot = || format!("cannot read {}", path.display());
        let file = tokio::fs::File::open(path).await.with_context(cannot)?;
        let metadata = file.metadata().await.with_context(cannot)?;
        ensure!(!metadata.is_dir(), "{} is a directory", path.display());
        Ok(Self {
            bytes: Box::new(file),
            name: path.file_name().and_then(|name| name.to_str()).map(ToOwned::to_owned),
            mode: Some(metadata.permissions().mode() & MODE_MASK).filter(|mode| *mode != 0),
            size: metadata.is_file().then_some(metadata.len()),
        })
    }
}

/// Returns the path to write. If it ends with a slash, it is a directory: the file keeps its name.
fn upload_path(path: &str, name: Option<&str>) -> Result<String> {
    if !path.is_empty() && !path.ends_with('/') {
        return Ok(path.to_owned());
    }
    let name = name.context("stdin has no file name: give one, such as work:notes.txt")?;
    Ok(format!("{path}{name}"))
}

/// Shows progress. Hidden if stderr is not a terminal.
fn progress_bar(size: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    match size {
        None => ProgressBar::new_spinner(),
        Some(size) => {
            let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {bytes_per_sec}");
            ProgressBar::new(size).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        }
    }
}

/// Lists a directory of a session, or shows one file.
pub(crate) async fn ls(client: &Client, args: &args::Ls, output: Output) -> Result<()> {
    let (session, path) = args.path.split_once(':').unwrap_or((&args.path, ""));
    let parent = resolve::session(client, session).await?;
    let listed = pages(args.limit, async |page_token| {
        let request = ListFilesRequest {
            parent: parent.clone(),
            path: path.to_owned(),
            page_size: PAGE_SIZE,
            page_token,
        };
        let page = client.files().list_files(request).await?.into_inner();
        Ok((page.files, page.next_page_token))
    })
    .await;
    let files = match listed {
        Err(error) if is_not_a_directory(&error) => {
            let request = StatFileRequest { parent, path: path.to_owned(), no_follow: false };
            let response = client.files().stat_file(request).await;
            let response = response.about_file(session, path)?;
            response.into_inner().file.into_iter().collect()
        }
        listed => listed.about_file(session, path)?,
    };
    output.print_list(&["MODE", "SIZE", "MODIFIED", "NAME"], &files, to_json, row)
}

fn is_not_a_directory(error: &anyhow::Error) -> bool {
    use tonic_types::StatusExt;
    error.downcast_ref::<tonic::Status>().is_some_and(|status| {
        status.code() == Code::FailedPrecondition
            && status.get_details_error_info().is_some_and(|info| info.reason == "NOT_A_DIRECTORY")
    })
}

fn row(file: &File) -> Vec<String> {
    let name = Path::new(&file.path).file_name().unwrap_or_default().to_string_lossy();
    let name = match file.kind() {
        FileKind::Directory => format!("{name}/"),
        FileKind::Symlink => format!("{name} -> {}", file.link_target),
        FileKind::Regular | FileKind::Special | FileKind::Unspecified => name.into_owned(),
    };
    vec![
        format!("{:04o}", file.mode),
        file.size_bytes.to_string(),
        record::timestamp(file.modify_time.as_ref()).unwrap_or_default(),
        name,
    ]
}

fn to_json(file: &File) -> Value {
    let kind = match file.kind() {
        FileKind::Regular => "regular",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Special => "special",
        FileKind::Unspecified => "unknown",
    };
    json!({
        "path": file.path,
        "kind": kind,
        "size_bytes": file.size_bytes,
        "modify_time": record::timestamp(file.modify_time.as_ref()),
        "mode": format!("{:04o}", file.mode),
        "etag": file.etag,
        "link_target": Some(&file.link_target).filter(|target| !target.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn download_to_directory_gets_requested_name() {
        let temp = tempfile::tempdir().unwrap();
        let into = CopyPath::Local(temp.path().to_owned());
        for (requested, name) in [("a", "a"), ("out/b", "b"), ("/workspace/c/", "c"), ("d/.", "d")] {
            let target = Target::new(&into, requested, false).unwrap();
            assert_eq!(target, Target::File(temp.path().join(name), false), "{requested}");
        }
        for nameless in ["", "/", "..", "a/..", "."] {
            assert!(Target::new(&into, nameless, true).is_err(), "{nameless}");
        }
    }

    #[test]
    fn download_never_replaces_or_follows_silently() {
        let temp = tempfile::tempdir().unwrap();
        let [victim, link, new] = ["victim", "link", "new"].map(|name| temp.path().join(name));
        std::fs::write(&victim, "before").unwrap();
        std::os::unix::fs::symlink("victim", &link).unwrap();
        let written = |path: &Path, force| {
            let mut sink = Target::File(path.to_owned(), force).open(0o6755)?;
            sink.write(b"after")?;
            sink.finish()
        };
        for existing in [&victim, &link] {
            assert!(written(existing, false).unwrap_err().to_string().contains("--force"));
        }
        written(&link, true).unwrap();
        assert!(!link.is_symlink(), "the link itself is replaced");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "before");
        written(&new, false).unwrap();
        let mode = std::fs::metadata(&new).unwrap().permissions().mode() & 0o7777;
        assert!(mode & 0o7000 == 0 && mode & 0o700 == 0o700, "{mode:o}");
        assert!(written(temp.path(), true).is_err(), "a directory is never replaced");
        // A name that appears during the download is kept.
        let late = temp.path().join("late");
        let sink = Target::File(late.clone(), false).open(0o644).unwrap();
        std::fs::write(&late, "first").unwrap();
        assert!(sink.finish().is_err());
        assert_eq!(std::fs::read_to_string(&late).unwrap(), "first");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 4, "no temporary file is left");
    }

    #[test]
    fn upload_to_directory_keeps_file_name() {
        assert_eq!(upload_path("a/b", Some("c")).unwrap(), "a/b");
        assert_eq!(upload_path("a/", Some("c")).unwrap(), "a/c");
        assert_eq!(upload_path("", Some("c")).unwrap(), "c");
        assert!(upload_path("", None).is_err());
    }
}
