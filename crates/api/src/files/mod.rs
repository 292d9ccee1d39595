//! `FileService`: file calls, forwarded to the worker that holds the session.

mod request;
mod route;
mod transfer;
mod traversal;
mod traversals;
mod watch;

use std::{pin::Pin, sync::Arc};

use codelia_proto::v1::{
    self, file_service_server::FileService, import_files_request, write_file_request,
};
use codelia_store::{Caller, EventKind};
use codelia_types::{Reason, SessionId};
use futures::Stream;
use tonic::{Request, Response, Status, Streaming};

use self::{
    request::{FileRequest, NameCursor},
    route::Client,
};
pub(crate) use self::{route::SessionRoute, traversals::Traversals};
use crate::{
    audit, auth,
    context::Context,
    error::ApiError,
    server::request::Deadline,
    wire::{paging::Page, resource_name},
};

/// Serves file calls: checks them and forwards them to the worker, which serves the same service.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) context: Arc<Context>,
}

/// What a call does with files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Read,
    /// Moves or removes files.
    Change,
    /// Also adds files, or makes one larger.
    Add,
}

/// The response of a worker.
struct Forwarded<R> {
    route: SessionRoute,
    session: SessionId,
    response: R,
}

impl Files {
    /// Validates a request and finds its session. Reports paths that leave the workspace by their
    /// text.
    async fn admit<Q: FileRequest>(
        &self,
        caller: &Caller,
        request: Q,
        use_of_files: Use,
    ) -> Result<(SessionRoute, Q), ApiError> {
        let context = self.context.clone();
        if let Some(path) = request.paths().into_iter().find(|path| request::leaves_workspace(path))
            && let Ok(session) = resource_name::session("parent", request.parent())
        {
            traversal::report(&context, caller, &session, path).await;
        }
        let request = request.checked()?;
        let session = resource_name::session("parent", request.parent())?;
        let writes = use_of_files != Use::Read;
        Ok((SessionRoute { context, tenant: caller.tenant.clone(), session, writes }, request))
    }

    /// Fails if the call adds files and the tenant has no room for any.
    async fn check_quota(&self, caller: &Caller, use_of_files: Use) -> Result<(), ApiError> {
        let Context { store, storage_quota, .. } = &*self.context;
        if use_of_files == Use::Add {
            storage_quota.check_files(store, caller).await
        } else {
            Ok(())
        }
    }

    /// Forwards a call with one request.
    async fn forward<Q: FileRequest + Clone, R, F>(
        &self,
        caller: &Caller,
        request: Q,
        use_of_files: Use,
        call: impl Fn(Client, Request<Q>) -> F,
    ) -> Result<Forwarded<R>, ApiError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let (route, request) = self.admit(caller, request, use_of_files).await?;
        let called = match self.check_quota(caller, use_of_files).await {
            Ok(()) => route.call(&request, call).await,
            Err(error) => Err(error),
        };
        let (session, response) = self.audited(caller, &route, &request.paths(), called).await?;
        Ok(Forwarded { route, session, response })
    }

    /// Forwards a call with one request and one response.
    async fn call<Q: FileRequest + Clone, R, F>(
        &self,
        request: Request<Q>,
        use_of_files: Use,
        call: impl Fn(Client, Request<Q>) -> F,
    ) -> Result<Response<R>, Status>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        let caller = auth::caller(request.extensions())?;
        let forwarded = self.forward(&caller, request.into_inner(), use_of_files, call).await?;
        Ok(Response::new(forwarded.response))
    }

    /// Records the error if it is a refusal of the call for these paths.
    async fn audited<T>(
        &self,
        caller: &Caller,
        route: &SessionRoute,
        paths: &[&str],
        result: Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        if let Err(error) = &result {
            let store = &self.context.store;
            audit::record(store, caller, EventKind::FileRefused, Some(&route.session), error).await;
        }
        if let Err(error) = &result
            && error.reason() == Reason::PathLeadsOut
        {
            traversal::report(&self.context, caller, &route.session, &paths.join(" -> ")).await;
        }
        result
    }

    /// The worker makes the page and its token; the token of the caller is only for this list.
    async fn list(
        &self,
        caller: &Caller,
        request: v1::ListFilesRequest,
    ) -> Result<v1::ListFilesResponse, ApiError> {
        let page = Page::<NameCursor, v1::File>::parse(&caller.tenant, &request)?;
        let page_token = page.after.as_ref().map(NameCursor::to_string).unwrap_or_default();
        let request = v1::ListFilesRequest { page_size: page.size(), page_token, ..request };
        let call = |mut worker: Client, request| async move { worker.list_files(request).await };
        let mut listed: v1::ListFilesResponse =
            self.forward(caller, request, Use::Read, call).await?.response;
        if !listed.next_page_token.is_empty() {
            listed.next_page_token = page.token_after(&listed.next_page_token);
        }
        Ok(listed)
    }
}

#[tonic::async_trait]
impl FileService for Files {
    type ReadFileStream = Pin<Box<dyn Stream<Item = Result<v1::ReadFileResponse, Status>> + Send>>;
    type ExportFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::ExportFilesResponse, Status>> + Send>>;
    type WatchFilesStream =
        Pin<Box<dyn Stream<Item = Result<v1::WatchFilesResponse, Status>> + Send>>;

    async fn write_file(
        &self,
        request: Request<Streaming<v1::WriteFileRequest>>,
    ) -> Result<Response<v1::WriteFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut requests = request.into_inner();
        let open = transfer::read_open(&mut requests).await?;
        let admitted = self.admit(&caller, open, Use::Add).await;
        let (route, open) = admitted.map_err(|error| error.within("open"))?;
        let path = open.path.clone();
        let first = v1::WriteFileRequest { kind: Some(write_file_request::Kind::Open(open)) };
        let call = async |mut worker: Client, messages| worker.write_file(messages).await;
        let written = match self.check_quota(&caller, Use::Add).await {
            Ok(()) => transfer::upload(&route, first, requests, transfer::write_part, call).await,
            Err(error) => Err(error),
        };
        Ok(Response::new(self.audited(&caller, &route, &[&path], written).await?))
    }

    async fn read_file(
        &self,
        request: Request<v1::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let call = |mut worker: Client, request| async move { worker.read_file(request).await };
        let opened = self.forward(&caller, request.into_inner(), Use::Read, call).await?;
        let Forwarded { route, session, response } = opened;
        Ok(Response::new(Box::pin(transfer::send_download(route, session, response, deadline))))
    }

    async fn stat_file(
        &self,
        request: Request<v1::StatFileRequest>,
    ) -> Result<Response<v1::StatFileResponse>, Status> {
        let call = |mut worker: Client, request| async move { worker.stat_file(request).await };
        self.call(request, Use::Read, call).await
    }

    async fn list_files(
        &self,
        request: Request<v1::ListFilesRequest>,
    ) -> Result<Response<v1::ListFilesResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.list(&caller, request.into_inner()).await?))
    }

    async fn make_directory(
        &self,
        request: Request<v1::MakeDirectoryRequest>,
    ) -> Result<Response<v1::MakeDirectoryResponse>, Status> {
        let call =
            |mut worker: Client, request| async move { worker.make_directory(request).await };
        self.call(request, Use::Add, call).await
    }

    async fn move_file(
        &self,
        request: Request<v1::MoveFileRequest>,
    ) -> Result<Response<v1::MoveFileResponse>, Status> {
        let call = |mut worker: Client, request| async move { worker.move_file(request).await };
        self.call(request, Use::Change, call).await
    }

    async fn copy_file(
        &self,
        request: Request<v1::CopyFileRequest>,
    ) -> Result<Response<v1::CopyFileResponse>, Status> {
        let call = |mut worker: Client, request| async move { worker.copy_file(request).await };
        self.call(request, Use::Add, call).await
    }

    async fn remove_file(
        &self,
        request: Request<v1::RemoveFileRequest>,
    ) -> Result<Response<v1::RemoveFileResponse>, Status> {
        let call = |mut worker: Client, request| async move { worker.remove_file(request).await };
        self.call(request, Use::Change, call).await
    }

    async fn edit_file(
        &self,
        request: Request<v1::EditFileRequest>,
    ) -> Result<Response<v1::EditFileResponse>, Status> {
        let call = |mut worker: Client, request| async move { worker.edit_file(request).await };
        self.call(request, Use::Add, call).await
    }

    async fn export_files(
        &self,
        request: Request<v1::ExportFilesRequest>,
    ) -> Result<Response<Self::ExportFilesStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let call = |mut worker: Client, request| async move { worker.export_files(request).await };
        let opened = self.forward(&caller, request.into_inner(), Use::Read, call).await?;
        let Forwarded { route, session, response } = opened;
        Ok(Response::new(Box::pin(transfer::send_download(route, session, response, deadline))))
    }

    async fn watch_files(
        &self,
        request: Request<v1::WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let call = |mut worker: Client, request| async move { worker.watch_files(request).await };
        let opened = self.forward(&caller, request.into_inner(), Use::Read, call).await?;
        let Forwarded { route, session, response } = opened;
        Ok(Response::new(Box::pin(watch::send(route, session, response, deadline))))
    }

    async fn import_files(
        &self,
        request: Request<Streaming<v1::ImportFilesRequest>>,
    ) -> Result<Response<v1::ImportFilesResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut requests = request.into_inner();
        let open = transfer::read_import(&mut requests).await?;
        let admitted = self.admit(&caller, open, Use::Add).await;
        let (route, open) = admitted.map_err(|error| error.within("open"))?;
        let path = open.path.clone();
        let first = v1::ImportFilesRequest { kind: Some(import_files_request::Kind::Open(open)) };
        let call = async |mut worker: Client, messages| worker.import_files(messages).await;
        let imported = match self.check_quota(&caller, Use::Add).await {
            Ok(()) => transfer::upload(&route, first, requests, transfer::import_part, call).await,
            Err(error) => Err(error),
        };
        Ok(Response::new(self.audited(&caller, &route, &[&path], imported).await?))
    }
}
