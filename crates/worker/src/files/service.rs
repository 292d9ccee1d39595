//! The calls of the service.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use codelia_proto::{
    HeldSession,
    internal::v1::{
        DecideChangesRequest, DecideChangesResponse, worker_file_service_server::WorkerFileService,
    },
    v1::{self, file_service_server, import_files_request, write_file_request},
};
use codelia_store::ChangesDecision;
use codelia_telemetry::{DiskCause, DiskEffect, metrics};
use codelia_types::{Reason, SessionId};
use futures::{Stream, TryStreamExt, stream};
use tokio::time::timeout;
use tonic::{Request, Response, Status, Streaming};

use super::{
    archive::{Export, Import},
    calls,
    error::FileError,
    limiter::{CallLimiter, CallShare},
    listing,
    read::FileRead,
    upload::{Upload, WriteOptions},
    watch::{self, WatchLimiter, Watcher},
    workspace::{self, Use, Workspace},
};
use crate::{
    core::Core,
    file_work::blocking,
    run::changes::{self, held::NotDecided},
    session::acquire::SessionLeases,
};

/// An upload ends when its caller sends nothing for this long.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves file calls, and decisions about held changes. Only apis reach it: see `rpc::server`.
#[derive(Debug)]
pub(crate) struct FileService {
    core: Arc<Core>,
    leases: SessionLeases,
    limiter: CallLimiter,
    watches: WatchLimiter,
}

impl FileService {
    pub(crate) fn new(core: Arc<Core>, leases: SessionLeases) -> Self {
        Self { core, leases, limiter: CallLimiter::default(), watches: WatchLimiter::default() }
    }

    /// Takes over or releases the session if only the store knows that this worker holds it.
    async fn recover_unknown(&self, requested: &HeldSession) -> Result<(), FileError> {
        let HeldSession { session, epoch, .. } = *requested;
        let recovered = self.leases.recover_unknown(session, epoch).await;
        recovered.map_err(|error| {
            tracing::warn!(%error, %session, "cannot recover a session that this worker does not know");
            Reason::Unavailable.into()
        })
    }

    /// Refuses to write when the worker is short of space or the tenant at its quota.
    async fn check_space(&self, session: SessionId) -> Result<(), FileError> {
        self.core.space.look_again_if_short().await;
        let Some(cause) = self.core.space.obstacle(session) else { return Ok(()) };
        metrics().disk.limited(cause, DiskEffect::CallRefused);
        match cause {
            DiskCause::Tenant => Err(Reason::QuotaExceeded.into()),
            DiskCause::Reserve | DiskCause::Session => Err(Reason::DiskFull.into()),
        }
    }

    /// Admits a call and opens its workspace.
    async fn open(&self, held: &HeldSession, use_of_files: Use) -> Result<Workspace, FileError> {
        if use_of_files == Use::Add {
            self.check_space(held.session).await?;
        }
        self.recover_unknown(held).await?;
        let permit =
            self.limiter.try_acquire(held.tenant.as_str()).ok_or(Reason::TooManyFileCalls)?;
        let use_of_workspace = workspace::enter(&self.core, held.session, use_of_files).await?;
        let core = self.core.clone();
        let held = held.clone();
        blocking(move || Workspace::open(core, &held, permit, use_of_workspace, use_of_files)).await
    }

    /// Makes a call with one request and one response. Errors are about `field`, unless the work
    /// names another one.
    async fn call<Q, R>(
        &self,
        request: Request<Q>,
        use_of_files: Use,
        field: &'static str,
        work: impl FnOnce(&Workspace, &Q) -> Result<R, FileError> + Send + 'static,
    ) -> Result<Response<R>, Status>
    where
        Q: Send + 'static,
        R: Send + 'static,
    {
        let workspace = self.open(&held(&request)?, use_of_files).await?;
        let request = request.into_inner();
        let done = blocking(move || work(&workspace, &request)).await;
        Ok(Response::new(done.map_err(FileError::at(field))?))
    }

    async fn write(
        &self,
        request: Request<Streaming<v1::WriteFileRequest>>,
    ) -> Result<v1::File, FileError> {
        use write_file_request::Kind;
        let held = held(&request)?;
        let mut requests = request.into_inner();
        let Some(Kind::Open(open)) = next(&mut requests).await?.and_then(|message| message.kind)
        else {
            return Err(Reason::InvalidField.into());
        };
        let workspace = Arc::new(self.open(&held, Use::Add).await?);
        let mut upload = begin(&workspace, open).await.map_err(FileError::at("open.path"))?;
        loop {
            let shared = workspace.clone();
            match next(&mut requests).await?.and_then(|message| message.kind) {
                Some(Kind::Data(data)) => {
                    self.check_space(held.session).await?;
                    let appended = blocking(move || upload.append(&shared, &data).map(|()| upload));
                    upload = appended.await.map_err(FileError::at("data"))?;
                }
                Some(Kind::Finish(_)) => {
                    return blocking(move || upload.publish(&shared))
                        .await
                        .map_err(FileError::at("open.path"));
                }
                // The caller left. The file has no name yet and is gone when `upload` is dropped.
                Some(Kind::Open(_)) | None => return Err(Reason::InvalidField.into()),
            }
        }
    }

    /// Admits an archive and opens its workspace.
    async fn open_archive(
        &self,
        held: &HeldSession,
        use_of_files: Use,
    ) -> Result<(Workspace, CallShare), FileError> {
        let workspace = self.open(held, use_of_files).await?;
        let permit = self.limiter.try_acquire_archive(held.tenant.as_str());
        Ok((workspace, permit.ok_or(Reason::TooManyFileCalls)?))
    }

    async fn import(
        &self,
        request: Request<Streaming<v1::ImportFilesRequest>>,
    ) -> Result<v1::ImportFilesResponse, FileError> {
        use import_files_request::Kind;
        let held = held(&request)?;
        let mut requests = request.into_inner();
        let Some(Kind::Open(open)) = next(&mut requests).await?.and_then(|message| message.kind)
        else {
            return Err(Reason::InvalidField.into());
        };
        let (workspace, permit) = self.open_archive(&held, Use::Add).await?;
        let begun = blocking(move || Import::begin(workspace, permit, &open)).await;
        let mut import = begun.map_err(FileError::at("open.path"))?;
        loop {
            match next(&mut requests).await?.and_then(|message| message.kind) {
                Some(Kind::Data(data)) => {
                    self.check_space(held.session).await?;
                    let appended = blocking(move || import.append(&data).map(|()| import)).await;
                    import = appended.map_err(FileError::at("data"))?;
                }
                Some(Kind::Finish(_)) => {
                    return blocking(move || import.finish()).await.map_err(FileError::at("data"));
                }
                // The caller left.
                Some(Kind::Open(_)) | None => return Err(Reason::InvalidField.into()),
            }
        }
    }
}

/// The lease that a call relies on.
fn held<T>(request: &Request<T>) -> Result<HeldSession, FileError> {
    HeldSession::from_metadata(request.metadata()).ok_or_else(|| Reason::Unavailable.into())
}

fn export_stream(
    export: Export,
) -> impl Stream<Item = Result<v1::ExportFilesResponse, Status>> + Send {
    stream::try_unfold(export, |mut export| async move {
        let (next, export) = blocking(move || export.next().map(|next| (next, export))).await?;
        let Some(kind) = next else { return Ok(None) };
        Ok(Some((v1::ExportFilesResponse { kind: Some(kind) }, export)))
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

/// The next message; `None` at the end or when the caller left.
async fn next<T>(requests: &mut Streaming<T>) -> Result<Option<T>, FileError> {
    match timeout(STALL_TIMEOUT, requests.message()).await {
        Err(_) => Err(Reason::StreamStalled.into()),
        Ok(message) => Ok(message.ok().flatten()),
    }
}

#[tonic::async_trait]
impl WorkerFileService for FileService {
    async fn decide_changes(
        &self,
        request: Request<DecideChangesRequest>,
    ) -> Result<Response<DecideChangesResponse>, Status> {
        let held = held(&request)?;
        self.recover_unknown(&held).await?;
        let DecideChangesRequest { run_id, apply, key_id } = request.into_inner();
        let invalid = || FileError::from(Reason::InvalidField);
        let decision = ChangesDecision {
            session: held.session,
            run: run_id.parse().map_err(|_| invalid())?,
            apply,
            key: Some(key_id.parse().map_err(|_| invalid())?),
        };
        match changes::held::decide(&self.core, decision, held.epoch).await {
            Ok(()) => Ok(Response::new(DecideChangesResponse {})),
            Err(NotDecided::NotHeld) => Err(FileError::from(Reason::Unavailable).into()),
            Err(NotDecided::Busy) => Err(FileError::from(Reason::SessionBusy).into()),
            Err(NotDecided::Unknown) => Err(FileError::from(Reason::Internal).into()),
        }
    }
}

#[tonic::async_trait]
impl file_service_server::FileService for FileService {
    type ReadFileStream = Pin<Box<dyn Stream<Item = Result<v1::ReadFileResponse, Status>> + Send>>;
    type ExportFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::ExportFilesResponse, Status>> + Send>>;
    type WatchFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::WatchFilesResponse, Status>> + Send>>;

    async fn write_file(
        &self,
        request: Request<Streaming<v1::WriteFileRequest>>,
    ) -> Result<Response<v1::WriteFileResponse>, Status> {
        let file = Some(self.write(request).await?);
        Ok(Response::new(v1::WriteFileResponse { file }))
    }

    async fn read_file(
        &self,
        request: Request<v1::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let workspace = self.open(&held(&request)?, Use::Read).await?;
        let read = blocking(move || FileRead::open(workspace, request.get_ref())).await;
        let read = read.map_err(FileError::at("path"))?;
        Ok(Response::new(Box::pin(read.into_stream())))
    }

    async fn stat_file(
        &self,
        request: Request<v1::StatFileRequest>,
    ) -> Result<Response<v1::StatFileResponse>, Status> {
        self.call(request, Use::Read, "path", calls::stat).await
    }

    async fn list_files(
        &self,
        request: Request<v1::ListFilesRequest>,
    ) -> Result<Response<v1::ListFilesResponse>, Status> {
        self.call(request, Use::Read, "path", listing::list).await
    }

    async fn make_directory(
        &self,
        request: Request<v1::MakeDirectoryRequest>,
    ) -> Result<Response<v1::MakeDirectoryResponse>, Status> {
        self.call(request, Use::Add, "path", calls::make_directory).await
    }

    async fn move_file(
        &self,
        request: Request<v1::MoveFileRequest>,
    ) -> Result<Response<v1::MoveFileResponse>, Status> {
        self.call(request, Use::Change, "", calls::move_file).await
    }

    async fn copy_file(
        &self,
        request: Request<v1::CopyFileRequest>,
    ) -> Result<Response<v1::CopyFileResponse>, Status> {
        self.call(request, Use::Add, "", calls::copy).await
    }

    async fn remove_file(
        &self,
        request: Request<v1::RemoveFileRequest>,
    ) -> Result<Response<v1::RemoveFileResponse>, Status> {
        self.call(request, Use::Change, "path", calls::remove).await
    }

    async fn edit_file(
        &self,
        request: Request<v1::EditFileRequest>,
    ) -> Result<Response<v1::EditFileResponse>, Status> {
        self.call(request, Use::Add, "path", calls::edit).await
    }

    async fn export_files(
        &self,
        request: Request<v1::ExportFilesRequest>,
    ) -> Result<Response<Self::ExportFilesStream>, Status> {
        let (workspace, permit) = self.open_archive(&held(&request)?, Use::Read).await?;
        let export = blocking(move || Export::begin(workspace, permit, request.get_ref())).await;
        let export = export.map_err(FileError::at("path"))?;
        Ok(Response::new(Box::pin(export_stream(export))))
    }

    async fn watch_files(
        &self,
        request: Request<v1::WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let held = held(&request)?;
        let workspace = self.open(&held, Use::Read).await?;
        let permit = self.watches.try_acquire(held.tenant.as_str(), held.session);
        let permit = permit.ok_or_else(|| FileError::from(Reason::WatchLimit))?;
        let watcher = blocking(move || Watcher::begin(workspace, permit, request.get_ref())).await;
        let watcher = watcher.map_err(FileError::at("path"))?;
        Ok(Response::new(Box::pin(watch::into_stream(watcher))))
    }

    async fn import_files(
        &self,
        request: Request<Streaming<v1::ImportFilesRequest>>,
    ) -> Result<Response<v1::ImportFilesResponse>, Status> {
        Ok(Response::new(self.import(request).await?))
    }
}
