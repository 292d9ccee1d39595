//! `FileService`: file calls, forwarded to the worker that holds the session.

mod download;
mod forwarded;
mod request;
mod route;
mod traversal;
mod upload;

use std::sync::Arc;

use codelia_proto::v1::{self, file_service_server::FileService};
use codelia_store::{Caller, EventKind};
use codelia_types::{Reason, SessionId};
use tonic::{Request, Response, Status, Streaming};

use self::{
    forwarded::{ForwardedRequest, UploadMessage, Use},
    request::{FileRequest, NameCursor},
};
pub(crate) use self::{route::SessionRoute, traversal::RECORD_INTERVAL};
use crate::{
    audit, auth,
    context::Context,
    error::ApiError,
    rpc::{ResponseStream, serve},
    server::request::Deadline,
    wire::{paging::Page, resource_name},
};

/// Serves file calls: checks them and forwards them to the worker, which serves the same service.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) context: Arc<Context>,
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
        let writes = matches!(use_of_files, Use::Change | Use::Add);
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

    /// Forwards a call with one request, and returns how it went as well.
    async fn call_worker<Q: ForwardedRequest>(
        &self,
        caller: &Caller,
        request: Q,
    ) -> Result<Forwarded<Q::Response>, ApiError> {
        let (route, request) = self.admit(caller, request, Q::USE).await?;
        let called = match self.check_quota(caller, Q::USE).await {
            Ok(()) => route.call(&request, Q::send).await,
            Err(error) => Err(error),
        };
        let (session, response) = self.audited(caller, &route, &request.paths(), called).await?;
        Ok(Forwarded { route, session, response })
    }

    /// Forwards a call with one request and one response.
    async fn forward<Q: ForwardedRequest>(
        &self,
        caller: &Caller,
        request: Q,
    ) -> Result<Q::Response, ApiError> {
        Ok(self.call_worker(caller, request).await?.response)
    }

    /// Forwards a call with one request and a stream of responses.
    async fn download<M, Q>(
        &self,
        request: Request<Q>,
    ) -> Result<Response<ResponseStream<M>>, Status>
    where
        M: Send + 'static,
        Q: ForwardedRequest<Response = Streaming<M>>,
    {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let Forwarded { route, session, response } =
            self.call_worker(&caller, request.into_inner()).await?;
        let download = download::Download { route, session, is_watch: Q::USE == Use::Watch };
        Ok(Response::new(Box::pin(download.send(response, deadline))))
    }

    /// Forwards a call with a stream of requests and one response.
    async fn upload<M: UploadMessage>(
        &self,
        request: Request<Streaming<M>>,
    ) -> Result<Response<M::Response>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut messages = request.into_inner();
        let open = upload::read_open(&mut messages).await?;
        let admitted = self.admit(&caller, open, Use::Add).await;
        let (route, open) = admitted.map_err(|error| error.within("open"))?;
        let uploaded = match self.check_quota(&caller, Use::Add).await {
            Ok(()) => upload::send(&route, M::first(open.clone()), messages).await,
            Err(error) => Err(error),
        };
        Ok(Response::new(self.audited(&caller, &route, &open.paths(), uploaded).await?))
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
            if error.reason() == Reason::PathLeadsOut {
                traversal::report(&self.context, caller, &route.session, &paths.join(" -> ")).await;
            }
        }
        result
    }

    /// Lists files. The worker makes the page and its token; the token of the caller is only for
    /// this list.
    async fn list_files(
        &self,
        caller: &Caller,
        request: v1::ListFilesRequest,
    ) -> Result<v1::ListFilesResponse, ApiError> {
        let page = Page::<NameCursor, v1::File>::parse(&caller.tenant, &request)?;
        let page_token = page.after.as_ref().map(NameCursor::to_string).unwrap_or_default();
        let request = v1::ListFilesRequest { page_size: page.size(), page_token, ..request };
        let mut listed = self.forward(caller, request).await?;
        if !listed.next_page_token.is_empty() {
            listed.next_page_token = page.token_after(&listed.next_page_token);
        }
        Ok(listed)
    }
}

serve! {
    FileService for Files;
    type ReadFileStream = ReadFileResponse;
    type ExportFilesStream = ExportFilesResponse;
    type WatchFilesStream = WatchFilesResponse;
    request write_file(Streaming<v1::WriteFileRequest>) -> v1::WriteFileResponse = upload;
    request import_files(Streaming<v1::ImportFilesRequest>) -> v1::ImportFilesResponse = upload;
    request read_file(v1::ReadFileRequest) -> Self::ReadFileStream = download;
    request export_files(v1::ExportFilesRequest) -> Self::ExportFilesStream = download;
    request watch_files(v1::WatchFilesRequest) -> Self::WatchFilesStream = download;
    call list_files(ListFilesRequest) -> ListFilesResponse = list_files;
    call stat_file(StatFileRequest) -> StatFileResponse = forward;
    call make_directory(MakeDirectoryRequest) -> MakeDirectoryResponse = forward;
    call move_file(MoveFileRequest) -> MoveFileResponse = forward;
    call copy_file(CopyFileRequest) -> CopyFileResponse = forward;
    call remove_file(RemoveFileRequest) -> RemoveFileResponse = forward;
    call edit_file(EditFileRequest) -> EditFileResponse = forward;
}
