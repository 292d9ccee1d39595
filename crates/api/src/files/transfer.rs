//! Transfers the bytes of a file or archive between a caller and the session's worker, with a small buffer.
//! A caller that stalls is not waited for indefinitely.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use codelia_proto::{
    internal::v1::{self as wire, FileRefusalReason as Cause, OpenedFile, OpenedImport},
    v1::{self, import_files_request, write_file_request},
};
use codelia_store::SessionRef;
use codelia_telemetry::task;
use codelia_types::SessionId;
use futures::Stream;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::{
    error, request,
    route::{Retry, SessionHolder, SessionRoute},
};
use crate::{
    request::{Deadline, undecodable},
    resource_name,
    status::{ApiError, FileError},
};

/// Chunks buffered for the receiver.
const BUFFER: usize = 2;
/// How long a caller may take to send or to receive the next chunk.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a long transfer marks its session as used.
const MARK_USED_INTERVAL: Duration = Duration::from_secs(1);

/// A message of a caller that sends a file or an archive.
pub(super) enum Sent {
    /// The first message, which says where to.
    Open,
    Data(Bytes),
    Finish,
}

/// A request of a call that sends a file or an archive.
pub(super) trait Upload {
    /// The request of the call to the worker.
    type Wire: Send + 'static;

    /// What the message is; `None` if it is empty.
    fn sent(self) -> Option<Sent>;

    /// The next bytes, for the worker.
    fn data(data: Bytes) -> Self::Wire;

    /// The last message, for the worker.
    fn finish() -> Self::Wire;
}

impl Upload for v1::WriteFileRequest {
    type Wire = wire::WriteFileRequest;

    fn sent(self) -> Option<Sent> {
        self.kind.map(|kind| match kind {
            write_file_request::Kind::Open(_) => Sent::Open,
            write_file_request::Kind::Data(data) => Sent::Data(data),
            write_file_request::Kind::Finish(_) => Sent::Finish,
        })
    }

    fn data(data: Bytes) -> Self::Wire {
        wire::WriteFileRequest { kind: Some(wire::write_file_request::Kind::Data(data)) }
    }

    fn finish() -> Self::Wire {
        let finish = wire::write_file_request::Kind::Finish(v1::WriteFileFinish {});
        wire::WriteFileRequest { kind: Some(finish) }
    }
}

impl Upload for v1::ImportFilesRequest {
    type Wire = wire::ImportFilesRequest;

    fn sent(self) -> Option<Sent> {
        self.kind.map(|kind| match kind {
            import_files_request::Kind::Open(_) => Sent::Open,
            import_files_request::Kind::Data(data) => Sent::Data(data),
            import_files_request::Kind::Finish(_) => Sent::Finish,
        })
    }

    fn data(data: Bytes) -> Self::Wire {
        wire::ImportFilesRequest { kind: Some(wire::import_files_request::Kind::Data(data)) }
    }

    fn finish() -> Self::Wire {
        let finish = wire::import_files_request::Kind::Finish(v1::ImportFilesFinish {});
        wire::ImportFilesRequest { kind: Some(finish) }
    }
}

/// Reads the first message of a write.
pub(super) async fn read_open(
    requests: &mut Streaming<v1::WriteFileRequest>,
) -> Result<v1::WriteFileOpen, ApiError> {
    match next_message(requests).await?.map(|message| message.kind) {
        Some(Some(write_file_request::Kind::Open(open))) => Ok(open),
        Some(None) => Err(ApiError::invalid("kind", "required")),
        Some(Some(_)) | None => Err(ApiError::invalid("open", "must be the first message")),
    }
}

/// Reads the first message of an import.
pub(super) async fn read_import(
    requests: &mut Streaming<v1::ImportFilesRequest>,
) -> Result<v1::ImportFilesOpen, ApiError> {
    match next_message(requests).await?.map(|message| message.kind) {
        Some(Some(import_files_request::Kind::Open(open))) => Ok(open),
        Some(None) => Err(ApiError::invalid("kind", "required")),
        Some(Some(_)) | None => Err(ApiError::invalid("open", "must be the first message")),
    }
}

/// Validates the first message of a write, which names the session.
pub(super) fn check_open(open: v1::WriteFileOpen) -> Result<(SessionRef, v1::WriteFileOpen), ApiError> {
    let within = |error: ApiError| error.within("open");
    let session = resource_name::session("parent", &open.parent).map_err(within)?;
    Ok((session, request::open(open).map_err(within)?))
}

/// Validates the first message of an import, which names the session.
pub(super) fn check_import(open: v1::ImportFilesOpen) -> Result<(SessionRef, v1::ImportFilesOpen), ApiError> {
    let within = |error: ApiError| error.within("open");
    let session = resource_name::session("parent", &open.parent).map_err(within)?;
    Ok((session, request::import(open).map_err(within)?))
}

/// Writes a file at the worker, which publishes it only when it is complete.
pub(super) async fn write(
    route: &SessionRoute,
    open: v1::WriteFileOpen,
    requests: Streaming<v1::WriteFileRequest>,
) -> Result<v1::WriteFileResponse, ApiError> {
    let holder = route.holder(&mut Retry::new()).await?;
    let opened = OpenedFile { session: Some(holder.session.clone()), open: Some(open) };
    let mut client = route.client(&holder)?;
    let call = async |messages| client.write_file(messages).await;
    let first = wire::WriteFileRequest { kind: Some(wire::write_file_request::Kind::Open(opened)) };
    let response = send_upload(route, &holder, first, requests, call).await?;
    response.response.ok_or_else(|| ApiError::internal("worker returned no file"))
}

/// Unpacks an archive at the worker.
pub(super) async fn import(
    route: &SessionRoute,
    open: v1::ImportFilesOpen,
    requests: Streaming<v1::ImportFilesRequest>,
) -> Result<v1::ImportFilesResponse, ApiError> {
    let holder = route.holder(&mut Retry::new()).await?;
    let opened = OpenedImport { session: Some(holder.session.clone()), open: Some(open) };
    let mut client = route.client(&holder)?;
    let call = async |messages| client.import_files(messages).await;
    let first = wire::ImportFilesRequest { kind: Some(wire::import_files_request::Kind::Open(opened)) };
    let response = send_upload(route, &holder, first, requests, call).await?;
    response.response.ok_or_else(|| ApiError::internal("worker returned no result"))
}

/// Sends the caller's messages to the worker and returns its response.
async fn send_upload<M: Upload, R>(
    route: &SessionRoute,
    holder: &SessionHolder,
    first: M::Wire,
    mut requests: Streaming<M>,
    call: impl AsyncFnOnce(ReceiverStream<M::Wire>) -> Result<Response<R>, Status>,
) -> Result<R, ApiError> {
    let (chunks, outgoing) = mpsc::channel(BUFFER);
    // The channel is empty, so there is room.
    let _ = chunks.try_send(first);
    let mut response = pin!(call(ReceiverStream::new(outgoing)));
    let response = tokio::select! {
        // A response before the end of the upload is an error.
        response = &mut response => response,
        sent = forward_upload(route, holder.id, &mut requests, chunks) => {
            sent?;
            response.await
        }
    };
    response.map(Response::into_inner).map_err(|status| route.failure(holder, &status))
}

/// Forwards an upload. Only `finish` completes the file: a stream that broke looks like one that
/// ended.
async fn forward_upload<M: Upload>(
    route: &SessionRoute,
    session: SessionId,
    requests: &mut Streaming<M>,
    chunks: mpsc::Sender<M::Wire>,
) -> Result<(), ApiError> {
    let mut marked_used = Instant::now();
    loop {
        let (chunk, is_last) = match next_message(requests).await?.map(Upload::sent) {
            Some(Some(Sent::Data(data))) => {
                request::data(&data)?;
                (M::data(data), false)
            }
            Some(Some(Sent::Finish)) => (M::finish(), true),
            Some(Some(Sent::Open)) => {
                return Err(ApiError::invalid("open", "only allowed in the first message"));
            }
            Some(None) => return Err(ApiError::invalid("kind", "required")),
            None => return Err(ApiError::invalid("finish", "must be the last message")),
        };
        // A closed channel means that the worker has responded already.
        if chunks.send(chunk).await.is_err() || is_last {
            return Ok(());
        }
        if marked_used.elapsed() > MARK_USED_INTERVAL {
            route.mark_used(session).await?;
            marked_used = Instant::now();
        }
    }
}

/// The caller's next message; `None` at the end of its stream.
async fn next_message<M>(requests: &mut Streaming<M>) -> Result<Option<M>, ApiError> {
    let stalled = || ApiError::from(FileError::new(Cause::Stalled, "data"));
    let message = timeout(STALL_TIMEOUT, requests.message()).await.map_err(|_| stalled())?;
    // A caller whose stream broke does not see this error; the partial file is dropped.
    message.map_err(|status| undecodable(&status).unwrap_or_else(stalled))
}

/// A response of a worker with the response to the caller in it.
pub(super) trait Download: Send + 'static {
    type Response: Send + 'static;

    /// The response to the caller.
    fn response(self) -> Option<Self::Response>;
}

impl Download for wire::ReadFileResponse {
    type Response = v1::ReadFileResponse;

    fn response(self) -> Option<Self::Response> {
        self.response
    }
}

impl Download for wire::ExportFilesResponse {
    type Response = v1::ExportFilesResponse;

    fn response(self) -> Option<Self::Response> {
        self.response
    }
}

/// Sends a file or archive to the caller until it ends, the caller disconnects, its deadline passes or the
/// server stops.
pub(super) fn send_download<D: Download>(
    route: SessionRoute,
    (session, chunks): (SessionId, Streaming<D>),
    deadline: Deadline,
) -> impl Stream<Item = Result<D::Response, Status>> + Send {
    let (sender, receiver) = mpsc::channel(BUFFER);
    task::background("read file", async move {
        let ended = tokio::select! {
            ended = forward_download(&route, session, chunks, &sender) => ended,
            () = sender.closed() => Ok(()),
            () = deadline.passed() => Err(ApiError::DeadlineExceeded),
            () = route.context.stop_streams.cancelled() => Err(ApiError::ShuttingDown),
        };
        if let Err(error) = ended
            && sender.try_send(Err(error.into())).is_err()
        {
            tracing::debug!("client did not take the final error");
        }
    });
    ReceiverStream::new(receiver)
}

async fn forward_download<D: Download>(
    route: &SessionRoute,
    session: SessionId,
    mut chunks: Streaming<D>,
    sender: &mpsc::Sender<Result<D::Response, Status>>,
) -> Result<(), ApiError> {
    let broken = |status: Status| match error::from_status(&status) {
        Some(error) => error.into(),
        None => ApiError::unavailable(format_args!("file stream of the worker broke: {status}")),
    };
    let mut marked_used = Instant::now();
    while let Some(chunk) = chunks.message().await.map_err(broken)? {
        let chunk = chunk.response().ok_or_else(|| ApiError::internal("worker sent an empty message"))?;
        match sender.send_timeout(Ok(chunk), STALL_TIMEOUT).await {
            Ok(()) => {}
            Err(mpsc::error::SendTimeoutError::Closed(_)) => return Ok(()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                return Err(FileError::new(Cause::Stalled, "").into());
            }
        }
        if marked_used.elapsed() > MARK_USED_INTERVAL {
            route.mark_used(session).await?;
            marked_used = Instant::now();
        }
    }
    Ok(())
}
