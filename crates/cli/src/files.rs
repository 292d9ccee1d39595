//! `codelia cp` and `codelia ls`.

use std::{
    io::{IsTerminal, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    pin::pin,
    str::FromStr,
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
    args,
    client::{Client, pages, session_name},
    output::{Output, closed_or},
    record,
};

/// Bytes sent at once.
const PIECE: usize = 256 * 1024;
/// Pieces that wait for the server.
const AHEAD: usize = 4;
const MOST_LISTED: i32 = 1000;

/// One end of a copy, as it is written on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// A path in a session.
    Session { session: String, path: String },
    /// A path here.
    Local(PathBuf),
    /// Standard input or output.
    Stream,
}

impl FromStr for End {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-" {
            return Ok(Self::Stream);
        }
        Ok(match text.split_once(':') {
            // `./a:b` and `/a:b` are paths here.
            Some((session, path)) if !session.is_empty() && !session.starts_with(['.', '/']) => {
                Self::Session { session: session_name(session), path: path.to_owned() }
            }
            _ => Self::Local(text.into()),
        })
    }
}

/// Copies a file into a session or out of it.
pub(crate) async fn cp(client: &Client, args: &args::Cp, output: Output) -> Result<()> {
    let copied = match (&args.source, &args.destination) {
        (End::Session { session, path }, to @ (End::Local(_) | End::Stream)) => {
            download(client, session, path, to).await?
        }
        (from @ (End::Local(_) | End::Stream), End::Session { session, path }) => {
            upload(client, from, session, path).await?
        }
        _ => bail!("one of the two is SESSION:PATH, the other is a file here or `-`"),
    };
    let is_stdout = args.destination == End::Stream;
    if output.is_json() && !is_stdout { output.one(&describe(&copied), "") } else { Ok(()) }
}

async fn download(client: &Client, session: &str, path: &str, to: &End) -> Result<File> {
    let request = ReadFileRequest { parent: session.to_owned(), path: path.to_owned(), ..Default::default() };
    let mut pieces = client.files().read_file(request).await?.into_inner();
    let first = pieces.message().await?.and_then(|piece| piece.kind);
    let Some(read_file_response::Kind::File(file)) = first else { bail!("the server told of no file") };
    let mut target = Target::open(to, &file)?;
    let bar = bar(u64::try_from(file.size_bytes).ok());
    while let Some(piece) = pieces.message().await? {
        if let Some(read_file_response::Kind::Data(data)) = piece.kind {
            target.write(&data)?;
            bar.inc(data.len() as u64);
        }
    }
    bar.finish_and_clear();
    target.finish(&file)?;
    Ok(file)
}

/// Where a file from a session goes.
enum Target {
    Stdout,
    /// It gets its name when it is whole.
    File(NamedTempFile, PathBuf),
}

impl Target {
    fn open(to: &End, file: &File) -> Result<Self> {
        let End::Local(path) = to else { return Ok(Self::Stdout) };
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
            Self::Stdout => std::io::stdout().write_all(data).map_err(closed_or),
            Self::File(file, path) => {
                file.write_all(data).with_context(|| format!("cannot write {}", path.display()))
            }
        }
    }

    fn finish(self, file: &File) -> Result<()> {
        match self {
            Self::Stdout => std::io::stdout().flush().map_err(closed_or),
            Self::File(temporary, path) => {
                let mode = std::fs::Permissions::from_mode(file.mode & 0o777);
                temporary.as_file().set_permissions(mode)?;
                temporary.persist(&path).with_context(|| format!("cannot write {}", path.display()))?;
                Ok(())
            }
        }
    }
}

async fn upload(client: &Client, from: &End, session: &str, path: &str) -> Result<File> {
    let Source { mut bytes, name, mode, size } = Source::open(from).await?;
    let path = place(path, name.as_deref())?;
    let open = WriteFileOpen { parent: session.to_owned(), path, mode, ..WriteFileOpen::default() };
    let bar = bar(size);
    let (pieces, messages) = mpsc::channel(AHEAD);
    let mut files = client.files();
    let mut call = pin!(files.write_file(ReceiverStream::new(messages)));
    let answered = tokio::select! {
        // Before all of it was sent: a refusal.
        answered = &mut call => answered,
        fed = feed(pieces, open, &mut bytes, &bar) => {
            fed.context("cannot read the file")?;
            call.await
        }
    };
    bar.finish_and_clear();
    answered?.into_inner().file.context("the server told of no file")
}

async fn feed(
    pieces: mpsc::Sender<WriteFileRequest>,
    open: WriteFileOpen,
    bytes: &mut Bytes,
    bar: &ProgressBar,
) -> std::io::Result<()> {
    // Who does not take it any more has answered already.
    let send = async |kind| pieces.send(WriteFileRequest { kind: Some(kind) }).await.is_ok();
    let mut goes_on = send(Kind::Open(open)).await;
    while goes_on {
        let mut piece = Vec::with_capacity(PIECE);
        if (&mut *bytes).take(PIECE as u64).read_to_end(&mut piece).await? == 0 {
            send(Kind::Finish(WriteFileFinish {})).await;
            break;
        }
        bar.inc(piece.len() as u64);
        goes_on = send(Kind::Data(piece.into())).await;
    }
    Ok(())
}

type Bytes = Box<dyn tokio::io::AsyncRead + Send + Unpin>;

/// What is copied into a session.
struct Source {
    bytes: Bytes,
    name: Option<String>,
    mode: Option<u32>,
    size: Option<u64>,
}

impl Source {
    async fn open(from: &End) -> Result<Self> {
        let End::Local(path) = from else {
            return Ok(Self { bytes: Box::new(tokio::io::stdin()), name: None, mode: None, size: None });
        };
        let cannot = || format!("cannot read {}", path.display());
        let file = tokio::fs::File::open(path).await.with_context(cannot)?;
        let about = file.metadata().await.with_context(cannot)?;
        ensure!(!about.is_dir(), "{} is a directory", path.display());
        Ok(Self {
            bytes: Box::new(file),
            name: path.file_name().and_then(|name| name.to_str()).map(ToOwned::to_owned),
            mode: Some(about.permissions().mode() & 0o777).filter(|mode| *mode != 0),
            size: about.is_file().then_some(about.len()),
        })
    }
}

/// Where a file goes in the session: below a directory that is written with a slash, by its own name.
fn place(path: &str, name: Option<&str>) -> Result<String> {
    if !path.is_empty() && !path.ends_with('/') {
        return Ok(path.to_owned());
    }
    let name = name.context("say which file to write, such as work:notes.txt")?;
    Ok(format!("{path}{name}"))
}

/// How far it is; only where somebody can see it.
fn bar(size: Option<u64>) -> ProgressBar {
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

/// Lists a directory of a session, or tells about one file.
pub(crate) async fn ls(client: &Client, args: &args::Ls, output: Output) -> Result<()> {
    let (session, path) = args.place.split_once(':').unwrap_or((&args.place, ""));
    let parent = session_name(session);
    let listed = pages(args.limit, async |page_token| {
        let request = ListFilesRequest {
            parent: parent.clone(),
            path: path.to_owned(),
            page_size: MOST_LISTED,
            page_token,
        };
        let page = client.files().list_files(request).await?.into_inner();
        Ok((page.files, page.next_page_token))
    })
    .await;
    let files = match listed {
        Err(error) if is_no_directory(&error) => {
            let request = StatFileRequest { parent, path: path.to_owned(), no_follow: false };
            let file = client.files().stat_file(request).await?.into_inner().file;
            file.into_iter().collect()
        }
        listed => listed?,
    };
    output.list(&["MODE", "SIZE", "MODIFIED", "NAME"], &files, describe, row)
}

fn is_no_directory(error: &anyhow::Error) -> bool {
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

fn describe(file: &File) -> Value {
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
    fn what_has_a_session_before_its_colon_is_in_one() {
        let session = |session: &str, path: &str| End::Session { session: session.into(), path: path.into() };
        for (text, end) in [
            ("work:a/b", session("sessions/work", "a/b")),
            ("work:", session("sessions/work", "")),
            ("sessions/work:a:b", session("sessions/work", "a:b")),
            ("a/b", End::Local("a/b".into())),
            ("./a:b", End::Local("./a:b".into())),
            ("../a:b", End::Local("../a:b".into())),
            ("/a:b", End::Local("/a:b".into())),
            (":a", End::Local(":a".into())),
            ("-", End::Stream),
        ] {
            assert_eq!(text.parse(), Ok(end), "{text}");
        }
    }

    #[test]
    fn a_directory_is_completed_by_the_files_own_name() {
        assert_eq!(place("a/b", Some("c")).unwrap(), "a/b");
        assert_eq!(place("a/", Some("c")).unwrap(), "a/c");
        assert_eq!(place("", Some("c")).unwrap(), "c");
        assert!(place("", None).is_err());
    }
}
