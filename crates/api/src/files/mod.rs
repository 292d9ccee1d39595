//! `FileService`: file calls, forwarded to the worker that holds the session.

mod error;
mod request;
mod route;
mod transfer;
mod traversal;
mod watch;

use std::{pin::Pin, sync::Arc};

use codelia_proto::{
    internal::v1::{self as wire, call_file_request::Call},
    v1::{self, file_service_server::FileService},
};
use codelia_store::{Caller, EventKind, SessionRef};
use futures::Stream;
use tonic::{Request, Response, Status, Streaming};

use self::request::NameCursor;
pub(crate) use self::{route::SessionRoute, traversal::Traversals};
use crate::{
    audit, auth, context::Context, paging::Page, request::Deadline, resource_name, status::ApiError,
};

/// The service.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) context: Arc<Context>,
}

impl Files {
    fn route(&self, caller: &Caller, session: SessionRef, writes: bool) -> SessionRoute {
        SessionRoute { context: self.context.clone(), tenant: caller.tenant.clone(), session, writes }
    }

    /// Reports paths that leave the workspace by their text. The call is refused for them next.
    async fn report_traversal(&self, caller: &Caller, parent: &str, paths: &[&str]) {
        let Some(path) = paths.iter().find(|path| request::leaves_workspace(path)) else { return };
        if let Ok(session) = resource_name::session("parent", parent) {
            traversal::report(&self.context, caller, &session, path).await;
        }
    }

    async fn call(
        &self,
        caller: &Caller,
        parent: &str,
        call: Call,
    ) -> Result<wire::CallFileResponse, ApiError> {
        let writes = !matches!(call, Call::StatFile(_) | Call::ListFiles(_));
        let route = self.route(caller, resource_name::session("parent", parent)?, writes);
        let response = route.call(&call).await;
        self.audited(caller, &route, &paths(&call), response).await
    }

    /// Makes a call and returns the file that it is about.
    async fn call_one(&self, caller: &Caller, parent: &str, call: Call) -> Result<v1::File, ApiError> {
        single_file(self.call(caller, parent, call).await?.files)
    }

    /// Records the error if it is a refusal of the call for these paths.
    async fn audited<T>(
        &self,
        caller: &Caller,
        route: &SessionRoute,
        paths: &str,
        result: Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        if let Err(error) = &result {
            let store = &self.context.store;
            audit::record(store, caller, EventKind::FileRefused, Some(&route.session), error).await;
        }
        if let Err(ApiError::File(error)) = &result
            && error.leads_out()
        {
            traversal::report(&self.context, caller, &route.session, paths).await;
        }
        result
    }

    async fn list(
        &self,
        caller: &Caller,
        request: v1::ListFilesRequest,
    ) -> Result<v1::ListFilesResponse, ApiError> {
        let mut page = Page::<NameCursor, _>::parse(&caller.tenant, &request)?;
        self.report_traversal(caller, &request.parent, &[&request.path]).await;
        let path = request::directory("path", &request.path)?;
        let depth = request::depth(request.depth)?;
        while let Some(limit) = page.batch() {
            let after = page.after.as_ref().map(|cursor| cursor.0.clone()).unwrap_or_default();
            let directory = wire::ListedDirectory { path: path.clone(), after, limit, depth };
            let files = self.call(caller, &request.parent, Call::ListFiles(directory)).await?.files;
            page.add(files, |named| (NameCursor(named.file_name), named.file.unwrap_or_default()));
        }
        let (files, next_page_token) = page.finish();
        Ok(v1::ListFilesResponse { files, next_page_token })
    }
}

/// The paths that a call names.
fn paths(call: &Call) -> String {
    match call {
        Call::StatFile(request) => request.path.clone(),
        Call::ListFiles(request) => request.path.clone(),
        Call::MakeDirectory(request) => request.path.clone(),
        Call::RemoveFile(request) => request.path.clone(),
        Call::EditFile(request) => request.path.clone(),
        Call::MoveFile(request) => format!("{} -> {}", request.source_path, request.destination_path),
        Call::CopyFile(request) => format!("{} -> {}", request.source_path, request.destination_path),
    }
}

fn single_file(files: Vec<wire::NamedFile>) -> Result<v1::File, ApiError> {
    let file = files.into_iter().next().and_then(|named| named.file);
    file.ok_or_else(|| ApiError::internal("worker returned no file"))
}

#[tonic::async_trait]
impl FileService for Files {
    type ReadFileStream = Pin<Box<dyn Stream<Item = Result<v1::ReadFileResponse, Status>> + Send>>;
    type ExportFilesStream = Pin<Box<dyn Stream<Item = Result<v1::ExportFilesResponse, Status>> + Send>>;
    type WatchFilesStream = Pin<Box<dyn Stream<Item = Result<v1::WatchFilesResponse, Status>> + Send>>;

    async fn write_file(
        &self,
        request: Request<Streaming<v1::WriteFileRequest>>,
    ) -> Result<Response<v1::WriteFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut requests = request.into_inner();
        let open = transfer::read_open(&mut requests).await?;
        self.report_traversal(&caller, &open.parent, &[&open.path]).await;
        let (session, open) = transfer::check_open(open)?;
        let (route, path) = (self.route(&caller, session, true), open.path.clone());
        let written = transfer::write(&route, open, requests).await;
        Ok(Response::new(self.audited(&caller, &route, &path, written).await?))
    }

    async fn read_file(
        &self,
        request: Request<v1::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        let request = request::read(request)?;
        let route = self.route(&caller, resource_name::session("parent", &request.parent)?, false);
        let opened = route.read(&request).await;
        let chunks = self.audited(&caller, &route, &request.path, opened).await?;
        Ok(Response::new(Box::pin(transfer::send_download(route, chunks, deadline))))
    }

    async fn stat_file(
        &self,
        request: Request<v1::StatFileRequest>,
    ) -> Result<Response<v1::StatFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        request.path = request::path("path", &request.path)?;
        let parent = std::mem::take(&mut request.parent);
        let file = self.call_one(&caller, &parent, Call::StatFile(request)).await?;
        Ok(Response::new(v1::StatFileResponse { file: Some(file) }))
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
        let caller = auth::caller(request.extensions())?;
        let mut request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        request.path = request::path("path", &request.path)?;
        let parent = std::mem::take(&mut request.parent);
        let file = self.call_one(&caller, &parent, Call::MakeDirectory(request)).await?;
        Ok(Response::new(v1::MakeDirectoryResponse { file: Some(file) }))
    }

    async fn move_file(
        &self,
        request: Request<v1::MoveFileRequest>,
    ) -> Result<Response<v1::MoveFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.source_path, &request.destination_path])
            .await;
        request.source_path = request::path("source_path", &request.source_path)?;
        request.destination_path = request::path("destination_path", &request.destination_path)?;
        let parent = std::mem::take(&mut request.parent);
        let file = self.call_one(&caller, &parent, Call::MoveFile(request)).await?;
        Ok(Response::new(v1::MoveFileResponse { file: Some(file) }))
    }

    async fn copy_file(
        &self,
        request: Request<v1::CopyFileRequest>,
    ) -> Result<Response<v1::CopyFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.source_path, &request.destination_path])
            .await;
        request.source_path = request::path("source_path", &request.source_path)?;
        request.destination_path = request::path("destination_path", &request.destination_path)?;
        let parent = std::mem::take(&mut request.parent);
        let file = self.call_one(&caller, &parent, Call::CopyFile(request)).await?;
        Ok(Response::new(v1::CopyFileResponse { file: Some(file) }))
    }

    async fn remove_file(
        &self,
        request: Request<v1::RemoveFileRequest>,
    ) -> Result<Response<v1::RemoveFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        request.path = request::path("path", &request.path)?;
        let parent = std::mem::take(&mut request.parent);
        self.call(&caller, &parent, Call::RemoveFile(request)).await?;
        Ok(Response::new(v1::RemoveFileResponse {}))
    }

    async fn edit_file(
        &self,
        request: Request<v1::EditFileRequest>,
    ) -> Result<Response<v1::EditFileResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        let mut request = request::edit(request)?;
        let parent = std::mem::take(&mut request.parent);
        let response = self.call(&caller, &parent, Call::EditFile(request)).await?;
        let replacements = response.replacements;
        Ok(Response::new(v1::EditFileResponse { file: Some(single_file(response.files)?), replacements }))
    }

    async fn export_files(
        &self,
        request: Request<v1::ExportFilesRequest>,
    ) -> Result<Response<Self::ExportFilesStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        let request = request::export(request)?;
        let route = self.route(&caller, resource_name::session("parent", &request.parent)?, false);
        let opened = route.export(&request).await;
        let chunks = self.audited(&caller, &route, &request.path, opened).await?;
        Ok(Response::new(Box::pin(transfer::send_download(route, chunks, deadline))))
    }

    async fn watch_files(
        &self,
        request: Request<v1::WatchFilesRequest>,
    ) -> Result<Response<Self::WatchFilesStream>, Status> {
        let caller = auth::caller(request.extensions())?;
        let deadline = Deadline::from_request(&request);
        let mut request = request.into_inner();
        self.report_traversal(&caller, &request.parent, &[&request.path]).await;
        request.path = request::directory("path", &request.path)?;
        let route = self.route(&caller, resource_name::session("parent", &request.parent)?, false);
        let opened = route.watch(&request).await;
        let messages = self.audited(&caller, &route, &request.path, opened).await?;
        Ok(Response::new(Box::pin(watch::send(route, messages, deadline))))
    }

    async fn import_files(
        &self,
        request: Request<Streaming<v1::ImportFilesRequest>>,
    ) -> Result<Response<v1::ImportFilesResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let mut requests = request.into_inner();
        let open = transfer::read_import(&mut requests).await?;
        self.report_traversal(&caller, &open.parent, &[&open.path]).await;
        let (session, open) = transfer::check_import(open)?;
        let (route, path) = (self.route(&caller, session, true), open.path.clone());
        let imported = transfer::import(&route, open, requests).await;
        Ok(Response::new(self.audited(&caller, &route, &path, imported).await?))
    }
}
