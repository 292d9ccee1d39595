//! The calls of the service.

use std::{path::Path, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
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
    blocking::blocking,
    calls,
    error::FileError,
    limiter::{CallLimiter, CallShare},
    listing,
    read::FileRead,
    upload::{Upload, WriteOptions},
    watch::{self, WatchLimiter, Watcher},
    workspace::{Use, Workspace, Workspaces},
};
use crate::{
    disk::Space,
    run::changes::held::{Decider, NotDecided},
    session::acquire::SessionLeases,
};

/// An upload ends when its caller sends nothing for this long.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves file calls, and decisions about held changes. Only apis reach it: see `rpc::server`.
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
        Self {
            workspaces,
            decider,
            leases,
            limiter: Arc::default(),
            watches: Arc::default(),
            space,
        }
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
        self.space.look_again_if_short().await;
        let Some(cause) = self.space.obstacle(session) else { return Ok(()) };
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
        let use_of_workspace = self.workspaces.enter(held.session, use_of_files).await?;
        let (workspaces, held) = (self.workspaces.clone(), held.clone());
        blocking(move || workspaces.open(&held, permit, use_of_workspace, use_of_files)).await
    }

    /// Makes a call with one request and one response.
    async fn call<Q, R>(
        &self,
        request: Request<Q>,
        use_of_files: Use,
        work: impl FnOnce(&Workspace, &Q) -> Result<R, FileError> + Send + 'static,
    ) -> Result<Response<R>, Status>
    where
        Q: Send + 'static,
        R: Send + 'static,
    {
        let workspace = self.open(&held(&request)?, use_of_files).await?;
        let request = request.into_inner();
        Ok(Response::new(blocking(move || work(&workspace, &request)).await?))
    }

    /// Decides about the changes that a session holds.
    async fn decide(&self, request: Request<DecideChangesRequest>) -> Result<(), FileError> {
        let held = held(&request)?;
        self.recover_unknown(&held).await?;
        let DecideChangesRequest { run_id, apply, key_id } = request.into_inner();
        let decision = ChangesDecision {
            session: held.session,
            run: run_id.parse().map_err(|_| Reason::InvalidField)?,
            apply,
            key: Some(key_id.parse().map_err(|_| Reason::InvalidField)?),
        };
        self.decider.decide(decision, held.epoch).await.map_err(|error| {
            match error {
                NotDecided::NotHeld => Reason::Unavailable,
                NotDecided::Busy => Reason::SessionBusy,
                NotDecided::Unknown => Reason::Internal,
            }
            .into()
        })
    }

    async fn read(&self, request: Request<v1::ReadFileRequest>) -> Result<FileRead, FileError> {
        let workspace = self.open(&held(&request)?, Use::Read).await?;
        let read = blocking(move || FileRead::open(workspace, request.get_ref())).await;
        read.map_err(FileError::at("path"))
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
                    upload = append(shared, upload, data).await.map_err(FileError::at("data"))?
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

    async fn export(&self, request: Request<v1::ExportFilesRequest>) -> Result<Export, FileError> {
        let (workspace, permit) = self.open_archive(&held(&request)?, Use::Read).await?;
        let export = blocking(move || Export::begin(workspace, permit, request.get_ref())).await;
        export.map_err(FileError::at("path"))
    }

    async fn watch(&self, request: Request<v1::WatchFilesRequest>) -> Result<Watcher, FileError> {
        let held = held(&request)?;
        let workspace = self.open(&held, Use::Read).await?;
        let permit = self.watches.try_acquire(held.tenant.as_str(), held.session);
        let permit = permit.ok_or(Reason::WatchLimit)?;
        let watcher = blocking(move || Watcher::begin(workspace, permit, request.get_ref())).await;
        watcher.map_err(FileError::at("path"))
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

async fn append(
    workspace: Arc<Workspace>,
    mut upload: Upload,
    data: Bytes,
) -> Result<Upload, FileError> {
    blocking(move || upload.append(&workspace, &data).map(|()| upload)).await
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
        self.decide(request).await?;
        Ok(Response::new(DecideChangesResponse {}))
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
        let read = self.read(request).await?;
        Ok(Response::new(Box::pin(read.into_stream())))
    }

    async fn stat_file(
        &self,
        request: Request<v1::StatFileRequest>,
    ) -> Result<Response<v1::StatFileResponse>, Status> {
        let stat = |workspace: &Workspace, request: &_| {
            let file = calls::stat(workspace, request).map_err(FileError::at("path"))?;
            Ok(v1::StatFileResponse { file: Some(file) })
        };
        self.call(request, Use::Read, stat).await
    }

    async fn list_files(
        &self,
        request: Request<v1::ListFilesRequest>,
    ) -> Result<Response<v1::ListFilesResponse>, Status> {
        let list = |workspace: &Workspace, request: &_| {
            listing::list(workspace, request).map_err(FileError::at("path"))
        };
        self.call(request, Use::Read, list).await
    }

    async fn make_directory(
        &self,
        request: Request<v1::MakeDirectoryRequest>,
    ) -> Result<Response<v1::MakeDirectoryResponse>, Status> {
        let make = |workspace: &Workspace, request: &_| {
            let file = calls::make_directory(workspace, request).map_err(FileError::at("path"))?;
            Ok(v1::MakeDirectoryResponse { file: Some(file) })
        };
        self.call(request, Use::Add, make).await
    }

    async fn move_file(
        &self,
        request: Request<v1::MoveFileRequest>,
    ) -> Result<Response<v1::MoveFileResponse>, Status> {
        let moved = |workspace: &Workspace, request: &_| {
            Ok(v1::MoveFileResponse { file: Some(calls::move_file(workspace, request)?) })
        };
        self.call(request, Use::Change, moved).await
    }

    async fn copy_file(
        &self,
        request: Request<v1::CopyFileRequest>,
    ) -> Result<Response<v1::CopyFileResponse>, Status> {
        let copy = |workspace: &Workspace, request: &_| {
            Ok(v1::CopyFileResponse { file: Some(calls::copy(workspace, request)?) })
        };
        self.call(request, Use::Add, copy).await
    }

    async fn remove_file(
        &self,
        request: Request<v1::RemoveFileRequest>,
    ) -> Result<Response<v1::RemoveFileResponse>, Status> {
        let remove = |workspace: &Workspace, request: &_| {
            calls::remove(workspace, request).map_err(FileError::at("path"))?;
            Ok(v1::RemoveFileResponse {})
        };
        self.call(request, Use::Change, remove).await
    }

    async fn edit_file(
        &self,
        request: Request<v1::EditFileRequest>,
    ) -> Result<Response<v1::EditFileResponse>, Status> {
        let edit = |workspace: &Workspace, request: &_| {
            calls::edit(workspace, request).map_err(FileError::at("path"))
        };
        self.call(request, Use::Add, edit).await
    }

    async fn export_files(
        &self,
        request: Request<v1::ExportFilesRequest>,
    ) -> Result<Response<Self::ExportFilesStream>, Status> {
        let export = self.export(request).await?;
        Ok(Response::new(Box::pin(export_stream(export))))
    }

    async fn watch_files(
        &self,
        request: Request<v1::WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let watcher = self.watch(request).await?;
        Ok(Response::new(Box::pin(watch::into_stream(watcher))))
    }

    async fn import_files(
        &self,
        request: Request<Streaming<v1::ImportFilesRequest>>,
    ) -> Result<Response<v1::ImportFilesResponse>, Status> {
        Ok(Response::new(self.import(request).await?))
    }
}
