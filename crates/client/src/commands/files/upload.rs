//! One local file or stdin to a session.

use std::{path::Path, pin::pin, time::SystemTime};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    File, WriteFileFinish, WriteFileOpen, WriteFileRequest, write_file_request::Kind,
};
use indicatif::ProgressBar;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use super::{limits::MODE_MASK, remote_file::NO_FILE};
use crate::{client::Client, system};

/// Bytes in one message.
const CHUNK_BYTES: usize = 256 * 1024;
/// Messages that may wait to be sent.
const QUEUE_SIZE: usize = 4;

pub(super) type Bytes = Box<dyn tokio::io::AsyncRead + Send + Unpin>;

/// Source of an upload.
pub(super) struct Source {
    pub(super) bytes: Bytes,
    mode: Option<u32>,
    pub(super) size: Option<u64>,
    /// When a file was modified.
    pub(super) modified: Option<SystemTime>,
}

impl Source {
    pub(super) fn stdin() -> Self {
        Self { bytes: Box::new(tokio::io::stdin()), mode: None, size: None, modified: None }
    }

    /// Opens a file that the user named.
    pub(super) async fn open(path: &Path) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        let file = tokio::fs::File::open(path).await.with_context(cannot)?.into_std().await;
        let is_dir = file.metadata().with_context(cannot)?.is_dir();
        ensure!(!is_dir, "{} is a directory (copy it with -r)", path.display());
        Self::from_file(file).with_context(cannot)
    }

    pub(super) fn from_file(file: std::fs::File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            bytes: Box::new(tokio::fs::File::from_std(file)),
            mode: system::file_mode(&metadata)
                .map(|mode| mode & MODE_MASK)
                .filter(|mode| *mode != 0),
            size: metadata.is_file().then_some(metadata.len()),
            modified: metadata.modified().ok(),
        })
    }
}

/// Writes a file in the session `parent`.
pub(super) async fn upload(
    client: &Client,
    source: Source,
    parent: String,
    path: String,
    bar: &ProgressBar,
) -> Result<File> {
    let mode = source.mode.map(u32::cast_signed);
    let open =
        WriteFileOpen { parent, path, mode, create_parents: true, ..WriteFileOpen::default() };
    let messages = Messages {
        open: WriteFileRequest { kind: Some(Kind::Open(open)) },
        data: |data| WriteFileRequest { kind: Some(Kind::Data(data.into())) },
        finish: WriteFileRequest { kind: Some(Kind::Finish(WriteFileFinish {})) },
    };
    let mut files = client.files();
    let call = async |queue: ReceiverStream<_>| files.write_file(queue).await;
    let written = send(call, messages, source.bytes, "cannot read the file", bar).await?;
    written.file.context(NO_FILE)
}

/// The messages of a call that sends bytes.
pub(super) struct Messages<R> {
    pub(super) open: R,
    pub(super) data: fn(Vec<u8>) -> R,
    pub(super) finish: R,
}

/// Sends bytes with a call and returns its response. `cannot` says what failed if they cannot be
/// read.
pub(super) async fn send<R, T>(
    call: impl AsyncFnOnce(ReceiverStream<R>) -> Result<Response<T>, Status>,
    messages: Messages<R>,
    bytes: Bytes,
    cannot: &'static str,
    bar: &ProgressBar,
) -> Result<T> {
    let (requests, queue) = mpsc::channel(QUEUE_SIZE);
    let mut call = pin!(call(ReceiverStream::new(queue)));
    let response = tokio::select! {
        // A response before everything was sent is an error.
        response = &mut call => response,
        sent = send_chunks(requests, messages, bytes, bar) => {
            sent.context(cannot)?;
            call.await
        }
    };
    Ok(response?.into_inner())
}

async fn send_chunks<R>(
    requests: mpsc::Sender<R>,
    Messages { open, data, finish }: Messages<R>,
    mut bytes: Bytes,
    bar: &ProgressBar,
) -> std::io::Result<()> {
    // A closed queue means that the server has responded already.
    let mut is_open = requests.send(open).await.is_ok();
    while is_open {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        if (&mut bytes).take(CHUNK_BYTES as u64).read_to_end(&mut chunk).await? == 0 {
            let _ = requests.send(finish).await;
            break;
        }
        bar.inc(chunk.len() as u64);
        is_open = requests.send(data(chunk)).await.is_ok();
    }
    Ok(())
}
