//! `codelia cp` and `codelia ls`.

use std::{
    io::{IsTerminal, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    pin::pin,
};

use anyhow::{Context, Result, bail, ensure};
use codelia_proto::v1::{
    File, FileKind, ListFilesRequest, ReadFileRequest, StatFileRequest, WriteFileFinish, WriteFileOpen,
    WriteFileRequest, read_file_response, write_file_request::Kind,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::{
    args::{self, CopyPath},
    client::{Client, pages, session_name},
    error_report::AboutFile,
    output::{Output, stdout_error},
    record,
};

/// Bytes in one upload message.
const CHUNK_BYTES: usize = 256 * 1024;
/// Upload messages that may wait to be sent.
const QUEUE_SIZE: usize = 4;
/// Files requested per page.
const PAGE_SIZE: i32 = 1000;
const NO_FILE: &str = "the server sent no file";

/// Copies a file to or from a session.
pub(crate) async fn cp(client: &Client, args: &args::Cp, output: Output) -> Result<()> {
    use CopyPath::{Local, Session, Stdio};
    let (file, session, path) = match (&args.source, &args.destination) {
        (Session { session, path }, to @ (Local(_) | Stdio)) => {
            (download(client, session, path, to).await, session, path)
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

async fn download(client: &Client, session: &str, path: &str, to: &CopyPath) -> Result<File> {
    let request =
        ReadFileRequest { parent: session_name(session), path: path.to_owned(), ..Default::default() };
    let mut chunks = client.files().read_file(request).await?.into_inner();
    let first = chunks.message().await?.and_then(|chunk| chunk.kind);
    let Some(read_file_response::Kind::File(file)) = first else { bail!(NO_FILE) };
    let mut target = Target::open(to, &file)?;
    let bar = progress_bar(u64::try_from(file.size_bytes).ok());
    while let Some(chunk) = chunks.message().await? {
        if let Some(read_file_response::Kind::Data(data)) = chunk.kind {
            target.write(&data)?;
            bar.inc(data.len() as u64);
        }
    }
    bar.finish_and_clear();
    target.finish(&file)?;
    Ok(file)
}

/// Destination of a download.
enum Target {
    Stdout,
    /// A temporary file, renamed to the path once complete.
    File(NamedTempFile, PathBuf),
}

impl Target {
    fn open(to: &CopyPath, file: &File) -> Result<Self> {
        let CopyPath::Local(path) = to else { return Ok(Self::Stdout) };
        let path = if path.is_dir() {
            path.join(Path::new(&file.path).file_name().context("the file has no name")?)
        } else {
            path.clone()
        };
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = NamedTempFile::new_in(directory)
            .with_context(|| format!("cannot write to {}", directory.display()))?;
        Ok(Self::File(temporary, path))
    }

    fn write(&mut self, data: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => std::io::stdout().write_all(data).map_err(stdout_error),
            Self::File(file, path) => {
                file.write_all(data).with_context(|| format!("cannot write {}", path.display()))
            }
        }
    }

    fn finish(self, file: &File) -> Result<()> {
        match self {
            Self::Stdout => std::io::stdout().flush().map_err(stdout_error),
            Self::File(temporary, path) => {
                let mode = std::fs::Permissions::from_mode(file.mode & 0o777);
                temporary.as_file().set_permissions(mode)?;
                temporary.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
                Ok(())
            }
        }
    }
}

async fn upload(client: &Client, from: &CopyPath, session: &str, path: &str) -> Result<File> {
    let Source { mut bytes, name, mode, size } = Source::open(from).await?;
    let path = upload_path(path, name.as_deref())?;
    let open = WriteFileOpen { parent: session_name(session), path, mode, ..WriteFileOpen::default() };
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
            mode: Some(metadata.permissions().mode() & 0o777).filter(|mode| *mode != 0),
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
    let parent = session_name(session);
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
    fn upload_to_directory_keeps_file_name() {
        assert_eq!(upload_path("a/b", Some("c")).unwrap(), "a/b");
        assert_eq!(upload_path("a/", Some("c")).unwrap(), "a/c");
        assert_eq!(upload_path("", Some("c")).unwrap(), "c");
        assert!(upload_path("", None).is_err());
    }
}
