//! File calls on the sessions that this worker holds.
//!
//! Every one of them names the lease under which it was sent. File work is done beside the runtime,
//! piece by piece, so that a slow caller holds no thread.

mod calls;
mod error;
mod limiter;
mod upload;
mod workspace;

use std::{fs::File, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use codelia_proto::{
    internal::v1::{
        CallFileRequest, CallFileResponse, FileRefusalReason as Reason, HeldSession, ReadFileRequest,
        ReadFileResponse, WriteFileRequest, WriteFileResponse, worker_file_service_server::WorkerFileService,
        write_file_request::Kind,
    },
    v1::{self, read_file_response},
};
use futures::{Stream, TryStreamExt, stream};
use tokio::{task::spawn_blocking, time::timeout};
use tonic::{Request, Response, Status, Streaming};

use self::{
    error::Refusal,
    limiter::{Crowd, Ticket},
    upload::{Upload, Wanted, read_at},
    workspace::{Workspace, describe},
};
use crate::worker::Worker;

/// So much of a file is read at once.
const PIECE: usize = 256 * 1024;
/// A caller that sends nothing for so long has its upload ended.
const STALL: Duration = Duration::from_secs(60);

/// The service.
#[derive(Debug)]
pub(crate) struct Files {
    worker: Arc<Worker>,
    crowd: Arc<Crowd>,
}

impl Files {
    pub(crate) fn new(worker: Arc<Worker>) -> Self {
        Self { worker, crowd: Arc::default() }
    }

    /// Lets a call in, and opens the workspace it is for.
    async fn enter(&self, asked: Option<HeldSession>) -> Result<(Ticket, Workspace), Refusal> {
        let asked = asked.ok_or(Reason::NotHeld)?;
        let ticket = self.crowd.enter(&asked.tenant_id).ok_or(Reason::Busy)?;
        let worker = self.worker.clone();
        Ok((ticket, blocking(move || Workspace::open(worker, &asked)).await?))
    }

    async fn call(&self, request: CallFileRequest) -> Result<CallFileResponse, Refusal> {
        let (_ticket, workspace) = self.enter(request.session).await?;
        let call = request.call.ok_or(Reason::Impossible)?;
        blocking(move || calls::call(&workspace, call)).await
    }

    async fn read(&self, request: ReadFileRequest) -> Result<Reading, Refusal> {
        let (ticket, workspace) = self.enter(request.session).await?;
        let request = request.request.ok_or(Reason::Impossible)?;
        let opened = blocking(move || open(&workspace, &request)).await;
        let (file, head, at, end) = opened.map_err(Refusal::at("path"))?;
        Ok(Reading { file: Arc::new(file), head: Some(head), at, end, _ticket: ticket })
    }

    async fn write(&self, mut requests: Streaming<WriteFileRequest>) -> Result<v1::File, Refusal> {
        let Some(Kind::Open(opened)) = next(&mut requests).await? else {
            return Err(Reason::Impossible.into());
        };
        let (_ticket, workspace) = self.enter(opened.session).await?;
        let open = opened.open.ok_or(Reason::Impossible)?;
        let workspace = Arc::new(workspace);
        let mut upload = begin(&workspace, open).await.map_err(Refusal::at("open.path"))?;
        loop {
            let shared = workspace.clone();
            match next(&mut requests).await? {
                Some(Kind::Data(data)) => {
                    upload = append(shared, upload, data).await.map_err(Refusal::at("data"))?
                }
                Some(Kind::Finish(_)) => {
                    return blocking(move || upload.publish(&shared)).await.map_err(Refusal::at("open.path"));
                }
                // The caller left: what was written has no name and is gone with this.
                Some(Kind::Open(_)) | None => return Err(Reason::Impossible.into()),
            }
        }
    }
}

async fn begin(workspace: &Arc<Workspace>, open: v1::WriteFileOpen) -> Result<Upload, Refusal> {
    let shared = workspace.clone();
    blocking(move || {
        let wanted = Wanted { mode: open.mode, replace: !open.create_only, etag: open.etag };
        shared.as_session(|| Upload::begin(&shared, &open.path, wanted))
    })
    .await
}

async fn append(workspace: Arc<Workspace>, mut upload: Upload, data: Bytes) -> Result<Upload, Refusal> {
    blocking(move || upload.append(&workspace, &data).map(|()| upload)).await
}

/// The next message; `None` at the end, or when the caller is gone.
async fn next(requests: &mut Streaming<WriteFileRequest>) -> Result<Option<Kind>, Refusal> {
    match timeout(STALL, requests.message()).await {
        Err(_) => Err(Reason::Stalled.into()),
        Ok(message) => Ok(message.ok().flatten().and_then(|message| message.kind)),
    }
}

/// The file, what is told of it, and which part of it is read.
fn open(workspace: &Workspace, request: &v1::ReadFileRequest) -> Result<(File, v1::File, u64, u64), Refusal> {
    let negative = |_| Reason::Impossible;
    workspace.as_session(|| {
        let (place, entry) = workspace.find_file(&request.path)?;
        let file = entry.open()?;
        let size = u64::try_from(entry.stat.st_size).map_err(negative)?;
        let at = u64::try_from(request.offset).map_err(negative)?;
        let length = request.length.map(u64::try_from).transpose().map_err(negative)?;
        let end = length.map_or(size, |length| at.saturating_add(length).min(size));
        Ok((file, describe(&place.path, &entry)?, at, end))
    })
}

/// A file that is being read.
#[derive(Debug)]
struct Reading {
    file: Arc<File>,
    /// What is told first.
    head: Option<v1::File>,
    at: u64,
    end: u64,
    _ticket: Ticket,
}

impl Reading {
    async fn next(&mut self) -> Result<Option<read_file_response::Kind>, Refusal> {
        if let Some(head) = self.head.take() {
            return Ok(Some(read_file_response::Kind::File(head)));
        }
        let most = self.end.saturating_sub(self.at).min(PIECE as u64);
        let (file, at) = (self.file.clone(), self.at);
        let piece = blocking(move || read_at(&file, at, usize::try_from(most).unwrap_or(PIECE))).await?;
        self.at += piece.len() as u64;
        Ok((!piece.is_empty()).then(|| read_file_response::Kind::Data(piece.into())))
    }

    fn into_stream(self) -> impl Stream<Item = Result<ReadFileResponse, Status>> + Send {
        stream::try_unfold(self, |mut reading| async move {
            let Some(kind) = reading.next().await? else { return Ok(None) };
            let response = v1::ReadFileResponse { kind: Some(kind) };
            Ok(Some((ReadFileResponse { response: Some(response) }, reading)))
        })
        .map_err(|refusal: Refusal| refusal.into())
    }
}

#[tonic::async_trait]
impl WorkerFileService for Files {
    type ReadFileStream = Pin<Box<dyn Stream<Item = Result<ReadFileResponse, Status>> + Send>>;

    async fn call_file(
        &self,
        request: Request<CallFileRequest>,
    ) -> Result<Response<CallFileResponse>, Status> {
        Ok(Response::new(self.call(request.into_inner()).await?))
    }

    async fn read_file(
        &self,
        request: Request<ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let reading = self.read(request.into_inner()).await?;
        Ok(Response::new(Box::pin(reading.into_stream())))
    }

    async fn write_file(
        &self,
        request: Request<Streaming<WriteFileRequest>>,
    ) -> Result<Response<WriteFileResponse>, Status> {
        let file = self.write(request.into_inner()).await?;
        let response = v1::WriteFileResponse { file: Some(file) };
        Ok(Response::new(WriteFileResponse { response: Some(response) }))
    }
}

/// Does file work beside the runtime.
async fn blocking<T, F>(work: F) -> Result<T, Refusal>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, Refusal> + Send + 'static,
{
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => {
            tracing::error!(%panic, "a file call was not brought to its end");
            Err(Reason::Failed.into())
        }
    }
}
