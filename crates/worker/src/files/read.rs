//! `ReadFile`: a file, piece by piece.

use std::{fs::File, sync::Arc};

use codelia_proto::v1::{self, read_file_response};
use codelia_types::Reason;
use futures::{Stream, TryStreamExt, stream};
use tonic::Status;

use super::{
    error::FileError,
    limiter::CallPermit,
    upload::read_at,
    workspace::{Workspace, describe},
};
use crate::file_work::blocking;

/// How much of a file one message carries.
const READ_BYTES: usize = 256 * 1024;

/// A file that is being read.
#[derive(Debug)]
pub(super) struct FileRead {
    file: Arc<File>,
    /// The description of the file, sent first.
    head: Option<v1::File>,
    offset: u64,
    end: u64,
    _permit: CallPermit,
}

impl FileRead {
    pub(super) fn open(
        workspace: Workspace,
        request: &v1::ReadFileRequest,
    ) -> Result<Self, FileError> {
        let negative = |_| Reason::InvalidField;
        let (file, head, offset, end) = workspace.as_session(|| {
            let (target, entry) = workspace.find_file(&request.path)?;
            let file = Arc::new(entry.open()?);
            let size = u64::try_from(entry.stat.st_size).map_err(negative)?;
            let offset = u64::try_from(request.offset).map_err(negative)?;
            let length = request.length.map(u64::try_from).transpose().map_err(negative)?;
            let end = length.map_or(size, |length| offset.saturating_add(length).min(size));
            Ok((file, Some(describe(&target.path, &entry)?), offset, end))
        })?;
        Ok(Self { file, head, offset, end, _permit: workspace.permit })
    }

    async fn next(&mut self) -> Result<Option<read_file_response::Kind>, FileError> {
        if let Some(head) = self.head.take() {
            return Ok(Some(read_file_response::Kind::File(head)));
        }
        let max = self.end.saturating_sub(self.offset).min(READ_BYTES as u64);
        let file = self.file.clone();
        let offset = self.offset;
        let piece =
            blocking(move || read_at(&file, offset, usize::try_from(max).unwrap_or(READ_BYTES)))
                .await?;
        self.offset += piece.len() as u64;
        Ok((!piece.is_empty()).then(|| read_file_response::Kind::Data(piece.into())))
    }

    pub(super) fn into_stream(
        self,
    ) -> impl Stream<Item = Result<v1::ReadFileResponse, Status>> + Send {
        stream::try_unfold(self, |mut read| async move {
            let Some(kind) = read.next().await? else { return Ok(None) };
            Ok(Some((v1::ReadFileResponse { kind: Some(kind) }, read)))
        })
        .map_err(|error: FileError| error.into())
    }
}
