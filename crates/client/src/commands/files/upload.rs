//! One local file or stdin to a session.

use std::{path::Path, pin::pin, time::SystemTime};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    File, WriteFileFinish, WriteFileOpen, WriteFileRequest, write_file_request::Kind,
};
use indicatif::ProgressBar;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::{MODE_MASK, NO_FILE};
use crate::{client::Client, system};

/// Bytes in one message.
pub(super) const CHUNK_BYTES: usize = 256 * 1024;
/// Messages that may wait to be sent.
pub(super) const QUEUE_SIZE: usize = 4;

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
    mut source: Source,
    parent: String,
    path: String,
    bar: &ProgressBar,
) -> Result<File> {
    let mode = source.mode.map(u32::cast_signed);
    let open =
        WriteFileOpen { parent, path, mode, create_parents: true, ..WriteFileOpen::default() };
    let (requests, queue) = mpsc::channel(QUEUE_SIZE);
    let mut files = client.files();
    let mut call = pin!(files.write_file(ReceiverStream::new(queue)));
    let response = tokio::select! {
        // A response before everything was sent is an error.
        response = &mut call => response,
        sent = send_chunks(requests, open, &mut source.bytes, bar) => {
            sent.context("cannot read the file")?;
            call.await
        }
    };
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
