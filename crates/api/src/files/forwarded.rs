//! The calls that are forwarded to the worker as they are: with one request, or an upload.

use codelia_proto::v1::{self, import_files_request, write_file_request};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{request::FileRequest, route::Client};

/// What a call does with files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    /// Follows changes. That does not count as use of the session, which may end meanwhile.
    Watch,
    /// Moves or removes files.
    Change,
    /// Also adds files, or makes one larger.
    Add,
}

/// The response of a worker to a call.
type Answer<R> = Result<Response<R>, Status>;

/// The request of a call with one request.
pub(super) trait ForwardedRequest: FileRequest + Clone + Send + 'static {
    /// What the call does with files.
    const USE: Use;
    /// A message, or the stream of them.
    type Response: Send;

    /// Calls the worker.
    fn send(worker: Client, request: Request<Self>)
    -> impl Future<Output = Answer<Self::Response>>;
}

macro_rules! forwarded_requests {
    ($($request:ident: $method:ident -> $response:ty, $use:ident;)+) => {$(
        impl ForwardedRequest for v1::$request {
            const USE: Use = Use::$use;
            type Response = $response;

            async fn send(mut worker: Client, request: Request<Self>) -> Answer<$response> {
                worker.$method(request).await
            }
        }
    )+};
}

forwarded_requests! {
    CopyFileRequest: copy_file -> v1::CopyFileResponse, Add;
    EditFileRequest: edit_file -> v1::EditFileResponse, Add;
    ExportFilesRequest: export_files -> Streaming<v1::ExportFilesResponse>, Read;
    ListFilesRequest: list_files -> v1::ListFilesResponse, Read;
    MakeDirectoryRequest: make_directory -> v1::MakeDirectoryResponse, Add;
    MoveFileRequest: move_file -> v1::MoveFileResponse, Change;
    ReadFileRequest: read_file -> Streaming<v1::ReadFileResponse>, Read;
    RemoveFileRequest: remove_file -> v1::RemoveFileResponse, Change;
    StatFileRequest: stat_file -> v1::StatFileResponse, Read;
    WatchFilesRequest: watch_files -> Streaming<v1::WatchFilesResponse>, Watch;
}

/// What a message of an upload is.
pub(super) enum Part<'a, Open> {
    /// The first message, which says where to.
    Open(&'a Open),
    Data(&'a [u8]),
    Finish,
}

/// A message of a caller that sends a file or an archive.
pub(super) trait UploadMessage: Sized + Send + 'static {
    /// What the first message says.
    type Open: FileRequest + Clone;
    /// The response when all messages were sent.
    type Response;

    /// The first message.
    fn first(open: Self::Open) -> Self;

    /// What the message is; `None` if it is empty.
    fn part(&self) -> Option<Part<'_, Self::Open>>;

    /// Calls the worker.
    fn send(
        worker: Client,
        messages: Request<ReceiverStream<Self>>,
    ) -> impl Future<Output = Answer<Self::Response>>;
}

macro_rules! upload_messages {
    ($($message:ident($kind:ident, $open:ident): $method:ident -> $response:ident;)+) => {$(
        impl UploadMessage for v1::$message {
            type Open = v1::$open;
            type Response = v1::$response;

            fn first(open: v1::$open) -> Self {
                Self { kind: Some($kind::Kind::Open(open)) }
            }

            fn part(&self) -> Option<Part<'_, v1::$open>> {
                self.kind.as_ref().map(|kind| match kind {
                    $kind::Kind::Open(open) => Part::Open(open),
                    $kind::Kind::Data(data) => Part::Data(data),
                    $kind::Kind::Finish(_) => Part::Finish,
                })
            }

            async fn send(
                mut worker: Client,
                messages: Request<ReceiverStream<Self>>,
            ) -> Answer<v1::$response> {
                worker.$method(messages).await
            }
        }
    )+};
}

upload_messages! {
    WriteFileRequest(write_file_request, WriteFileOpen): write_file -> WriteFileResponse;
    ImportFilesRequest(import_files_request, ImportFilesOpen): import_files -> ImportFilesResponse;
}
