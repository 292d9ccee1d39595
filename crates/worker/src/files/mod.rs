//! File calls on the sessions that this worker holds.
//!
//! Each call names the lease under which it was sent. File work runs outside the async runtime,
//! piece by piece, so that a slow caller holds no thread.

mod archive;
mod calls;
mod error;
mod limiter;
mod listing;
mod reservation;
mod upload;
mod watch;
mod workspace;

use std::{fs::File, path::Path, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use codelia_proto::{
    internal::v1::{
        CallFileRequest, CallFileResponse, DecideChangesRequest, DecideChangesResponse, ExportFilesRequest,
        ExportFilesResponse, FileRefusalReason as Reason, HeldSession, ImportFilesRequest,
        ImportFilesResponse, ReadFileRequest, ReadFileResponse, WatchFilesRequest, WatchFilesResponse,
        WriteFileRequest, WriteFileResponse, call_file_request::Call, import_files_request,
        worker_file_service_server::WorkerFileService, write_file_request::Kind,
    },
    v1::{self, read_file_response},
};
use codelia_store::ChangesDecision;
use codelia_telemetry::{DiskCause, DiskEffect, metrics};
use codelia_types::{LeaseEpoch, SessionId};
use futures::{Stream, TryStreamExt, stream};
use tokio::{task::spawn_blocking, time::timeout};
use tonic::{Request, Response, Status, Streaming};

use self::{
    archive::{ArchivePermits, Export, Import},
    error::FileError,
    limiter::{CallLimiter, CallPermit},
    upload::{Upload, WriteOptions, read_at},
    watch::{WatchLimiter, Watcher},
    workspace::{Use, Workspace, describe},
};
use crate::{
    disk::Space,
    lease::acquire::SessionLeases,
    run::held::{Decider, NotDecided},
};

pub(crate) use self::workspace::Workspaces;

/// How much of a file one message carries.
const READ_BYTES: usize = 256 * 1024;
/// An upload ends when its caller sends nothing for this long.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The internal service for files.
#[derive(Debug)]
pub(crate) struct FileService {
    workspaces: Workspaces,
    decider: Arc<Decider>,
    leases: Arc<SessionLeases>,
    limiter: Arc<CallLimiter>,
    watches: Arc<WatchLimiter>,
    space: Arc<Space>,
}

impl FileService {
    pub(crate) fn new(
        workspaces: Workspaces,
        decider: Arc<Decider>,
        leases: Arc<SessionLeases>,
        space: Arc<Space>,
    ) -> Self {
        Self { workspaces, decider, leases, limiter: Arc::default(), watches: Arc::default(), space }
    }

    /// Takes over or releases the session if only the store knows that this worker holds it.
    async fn recover_unknown(&self, requested: &HeldSession) -> Result<(), FileError> {
        let session = requested.session_id.parse().map_err(|_| Reason::NotHeld)?;
        let recovered = self.leases.recover_unknown(session, LeaseEpoch(requested.lease_epoch)).await;
        recovered.map_err(|error| {
            tracing::warn!(%error, %session, "cannot recover a session that this worker does not know");
            Reason::NotHeld.into()
        })
    }

    /// Refuses to write when the worker is short of space or the tenant at its quota.
    async fn check_space(&self, session: SessionId) -> Result<(), FileError> {
        self.space.look_again_if_short().await;
        let Some(cause) = self.space.obstacle(session) else { return Ok(()) };
        metrics().disk_limited(cause, DiskEffect::CallRefused);
        match cause {
            DiskCause::Tenant => Err(Reason::TenantDiskFull.into()),
            DiskCause::Reserve | DiskCause::Session => Err(Reason::DiskFull.into()),
        }
    }

    /// Admits a call and opens its workspace.
    async fn open(&self, requested: Option<HeldSession>, use_of_files: Use) -> Result<Workspace, FileError> {
        let requested = requested.ok_or(Reason::NotHeld)?;
        self.recover_unknown(&requested).await?;
        let permit = self.limiter.try_acquire(&requested.tenant_id).ok_or(Reason::Busy)?;
        let use_of_workspace = self.workspaces.enter(&requested, use_of_files).await?;
        let workspaces = self.workspaces.clone();
        blocking(move || workspaces.open(&requested, permit, use_of_workspace, use_of_files)).await
    }

    /// Decides about the changes that a session holds.
    async fn decide(&self, request: DecideChangesRequest) -> Result<(), FileError> {
        let requested = request.session.ok_or(Reason::NotHeld)?;
        self.recover_unknown(&requested).await?;
        let HeldSession { session_id, lease_epoch, .. } = requested;
        let key = request.key_id.parse().map_err(|_| Reason::Impossible)?;
        let decision = ChangesDecision {
            session: session_id.parse().map_err(|_| Reason::NotHeld)?,
            run: request.run_id.parse().map_err(|_| Reason::Impossible)?,
            apply: request.apply,
            key: Some(key),
        };
        self.decider.decide(decision, LeaseEpoch(lease_epoch)).await.map_err(|error| {
            match error {
                NotDecided::NotHeld => Reason::NotHeld,
                NotDecided::Busy => Reason::SessionBusy,
                NotDecided::Unknown => Reason::Failed,
            }
            .into()
        })
    }

    async fn call(&self, request: CallFileRequest) -> Result<CallFileResponse, FileError> {
        let call = request.call.ok_or(Reason::Impossible)?;
        let use_of_files = match call {
            Call::StatFile(_) | Call::ListFiles(_) => Use::Read,
            Call::MakeDirectory(_)
            | Call::MoveFile(_)
            | Call::CopyFile(_)
            | Call::RemoveFile(_)
            | Call::EditFile(_) => Use::Change,
        };
        if matches!(call, Call::MakeDirectory(_) | Call::CopyFile(_) | Call::EditFile(_)) {
            self.check_space(session_id(request.session.as_ref())?).await?;
        }
        let workspace = self.open(request.session, use_of_files).await?;
        blocking(move || calls::call(&workspace, call)).await
    }

    async fn read(&self, request: ReadFileRequest) -> Result<FileRead, FileError> {
        let workspace = self.open(request.session, Use::Read).await?;
        let request = request.request.ok_or(Reason::Impossible)?;
        let read = blocking(move || FileRead::open(workspace, &request)).await;
        read.map_err(FileError::at("path"))
    }

    async fn write(&self, mut requests: Streaming<WriteFileRequest>) -> Result<v1::File, FileError> {
        let Some(Kind::Open(opened)) = next(&mut requests).await?.and_then(|message| message.kind) else {
            return Err(Reason::Impossible.into());
        };
        let session = session_id(opened.session.as_ref())?;
        self.check_space(session).await?;
        let workspace = self.open(opened.session, Use::Change).await?;
        let open = opened.open.ok_or(Reason::Impossible)?;
        let workspace = Arc::new(workspace);
        let mut upload = begin(&workspace, open).await.map_err(FileError::at("open.path"))?;
        loop {
            let shared = workspace.clone();
            match next(&mut requests).await?.and_then(|message| message.kind) {
                Some(Kind::Data(data)) => {
                    self.check_space(session).await?;
                    upload = append(shared, upload, data).await.map_err(FileError::at("data"))?
                }
                Some(Kind::Finish(_)) => {
                    return blocking(move || upload.publish(&shared))
                        .await
                        .map_err(FileError::at("open.path"));
                }
                // The caller left. The file has no name yet and is gone when `upload` is dropped.
                Some(Kind::Open(_)) | None => return Err(Reason::Impossible.into()),
            }
        }
    }

    /// Admits an archive and opens its workspace.
    async fn open_archive(
        &self,
        requested: Option<HeldSession>,
        use_of_files: Use,
    ) -> Result<(Workspace, ArchivePermits), FileError> {
        let tenant = requested.as_ref().map(|session| session.tenant_id.clone()).unwrap_or_default();
        let workspace = self.open(requested, use_of_files).await?;
        Ok((workspace, ArchivePermits::acquire(&self.limiter, &tenant)?))
    }

    async fn export(&self, request: ExportFilesRequest) -> Result<Export, FileError> {
        let (workspace, permits) = self.open_archive(request.session, Use::Read).await?;
        let request = request.request.ok_or(Reason::Impossible)?;
        let export = blocking(move || Export::begin(workspace, permits, &request)).await;
        export.map_err(FileError::at("path"))
    }

    async fn watch(&self, request: WatchFilesRequest) -> Result<Watcher, FileError> {
        let session = request.session.clone().ok_or(Reason::NotHeld)?;
        let workspace = self.open(request.session, Use::Read).await?;
        let id = session.session_id.parse().map_err(|_| Reason::NotHeld)?;
        let permit = self.watches.try_acquire(&session.tenant_id, id).ok_or(Reason::WatchLimit)?;
        let request = request.request.ok_or(Reason::Impossible)?;
        let watcher = blocking(move || Watcher::begin(workspace, permit, &request)).await;
        watcher.map_err(FileError::at("path"))
    }

    async fn import(
        &self,
        mut requests: Streaming<ImportFilesRequest>,
    ) -> Result<v1::ImportFilesResponse, FileError> {
        use import_files_request::Kind;
        let Some(Kind::Open(opened)) = next(&mut requests).await?.and_then(|message| message.kind) else {
            return Err(Reason::Impossible.into());
        };
        let session = session_id(opened.session.as_ref())?;
        self.check_space(session).await?;
        let (workspace, permits) = self.open_archive(opened.session, Use::Change).await?;
        let open = opened.open.ok_or(Reason::Impossible)?;
        let begun = blocking(move || Import::begin(workspace, permits, &open)).await;
        let mut import = begun.map_err(FileError::at("open.path"))?;
        loop {
            match next(&mut requests).await?.and_then(|message| message.kind) {
                Some(Kind::Data(data)) => {
                    self.check_space(session).await?;
                    let appended = blocking(move || import.append(&data).map(|()| import)).await;
                    import = appended.map_err(FileError::at("data"))?;
                }
                Some(Kind::Finish(_)) => {
                    return blocking(move || import.finish()).await.map_err(FileError::at("data"));
                }
                // The caller left.
                Some(Kind::Open(_)) | None => return Err(Reason::Impossible.into()),
            }
        }
    }
}

fn session_id(requested: Option<&HeldSession>) -> Result<SessionId, FileError> {
    let requested = requested.ok_or(Reason::NotHeld)?;
    requested.session_id.parse().map_err(|_| Reason::NotHeld.into())
}

fn export_stream(export: Export) -> impl Stream<Item = Result<ExportFilesResponse, Status>> + Send {
    stream::try_unfold(export, |mut export| async move {
        let (next, export) = blocking(move || export.next().map(|next| (next, export))).await?;
        let Some(kind) = next else { return Ok(None) };
        let response = v1::ExportFilesResponse { kind: Some(kind) };
        Ok(Some((ExportFilesResponse { response: Some(response) }, export)))
    })
    .map_err(|error: FileError| error.into())
}

async fn begin(workspace: &Arc<Workspace>, open: v1::WriteFileOpen) -> Result<Upload, FileError> {
    let shared = workspace.clone();
    blocking(move || {
        let mode = open.mode.map(i32::cast_unsigned);
        let options = WriteOptions { mode, replace: !open.create_only, etag: open.etag };
        shared.as_session(|| {
            if open.create_parents {
                calls::make_all(&shared, Path::new(&open.path).parent().unwrap_or(Path::new("")))?;
            }
            Upload::begin(&shared, &open.path, options)
        })
    })
    .await
}

async fn append(workspace: Arc<Workspace>, mut upload: Upload, data: Bytes) -> Result<Upload, FileError> {
    blocking(move || upload.append(&workspace, &data).map(|()| upload)).await
}

/// The next message; `None` at the end or when the caller left.
async fn next<T>(requests: &mut Streaming<T>) -> Result<Option<T>, FileError> {
    match timeout(STALL_TIMEOUT, requests.message()).await {
        Err(_) => Err(Reason::Stalled.into()),
        Ok(message) => Ok(message.ok().flatten()),
    }
}

/// A file that is being read.
#[derive(Debug)]
struct FileRead {
    file: Arc<File>,
    /// The description of the file, sent first.
    head: Option<v1::File>,
    offset: u64,
    end: u64,
    _permit: CallPermit,
}

impl FileRead {
    fn open(workspace: Workspace, request: &v1::ReadFileRequest) -> Result<Self, FileError> {
        let negative = |_| Reason::Impossible;
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
        let (file, offset) = (self.file.clone(), self.offset);
        let piece =
            blocking(move || read_at(&file, offset, usize::try_from(max).unwrap_or(READ_BYTES))).await?;
        self.offset += piece.len() as u64;
        Ok((!piece.is_empty()).then(|| read_file_response::Kind::Data(piece.into())))
    }

    fn into_stream(self) -> impl Stream<Item = Result<ReadFileResponse, Status>> + Send {
        stream::try_unfold(self, |mut read| async move {
            let Some(kind) = read.next().await? else { return Ok(None) };
            let response = v1::ReadFileResponse { kind: Some(kind) };
            Ok(Some((ReadFileResponse { response: Some(response) }, read)))
        })
        .map_err(|error: FileError| error.into())
    }
}

#[tonic::async_trait]
impl WorkerFileService for FileService {
    type ReadFileStream = Pin<Box<dyn Stream<Item = Result<ReadFileResponse, Status>> + Send>>;
    type ExportFilesStream = Pin<Box<dyn Stream<Item = Result<ExportFilesResponse, Status>> + Send>>;
    type WatchFilesStream = Pin<Box<dyn Stream<Item = Result<WatchFilesResponse, Status>> + Send>>;

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
        let read = self.read(request.into_inner()).await?;
        Ok(Response::new(Box::pin(read.into_stream())))
    }

    async fn write_file(
        &self,
        request: Request<Streaming<WriteFileRequest>>,
    ) -> Result<Response<WriteFileResponse>, Status> {
        let file = self.write(request.into_inner()).await?;
        let response = v1::WriteFileResponse { file: Some(file) };
        Ok(Response::new(WriteFileResponse { response: Some(response) }))
    }

    async fn decide_changes(
        &self,
        request: Request<DecideChangesRequest>,
    ) -> Result<Response<DecideChangesResponse>, Status> {
        self.decide(request.into_inner()).await?;
        Ok(Response::new(DecideChangesResponse {}))
    }

    async fn export_files(
        &self,
        request: Request<ExportFilesRequest>,
    ) -> Result<Response<Self::ExportFilesStream>, Status> {
        let export = self.export(request.into_inner()).await?;
        Ok(Response::new(Box::pin(export_stream(export))))
    }

    async fn watch_files(
        &self,
        request: Request<WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let watcher = self.watch(request.into_inner()).await?;
        Ok(Response::new(Box::pin(watch::into_stream(watcher))))
    }

    async fn import_files(
        &self,
        request: Request<Streaming<ImportFilesRequest>>,
    ) -> Result<Response<ImportFilesResponse>, Status> {
        let response = self.import(request.into_inner()).await?;
        Ok(Response::new(ImportFilesResponse { response: Some(response) }))
    }
}

/// Does file work outside the async runtime.
async fn blocking<T, F>(work: F) -> Result<T, FileError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, FileError> + Send + 'static,
{
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => {
            tracing::error!(%panic, "file call panicked");
            Err(Reason::Failed.into())
        }
    }
}
