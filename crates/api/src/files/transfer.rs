//! Transfers the bytes of a file or archive between a caller and the session's worker, with a small
//! buffer. A caller that stalls is not waited for indefinitely.

use std::{pin::pin, time::Duration};

use codelia_proto::v1::{self, import_files_request, write_file_request};
use codelia_telemetry::task;
use codelia_types::{Reason, SessionId};
use futures::Stream;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{
    request,
    route::{Client, Retry, SessionRoute},
};
use crate::{
    error::ApiError,
    server::request::{Deadline, undecodable},
};

/// Chunks buffered for the receiver.
const BUFFER: usize = 2;
/// How long a caller may take to send or to receive the next chunk.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
const STALLED: &str = "the stream stalled; start again";
/// How often a long transfer marks its session as used.
const MARK_USED_INTERVAL: Duration = Duration::from_secs(1);

/// A message of a caller that sends a file or an archive.
pub(super) enum Part<'a> {
    /// The first message, which says where to.
    Open,
    Data(&'a [u8]),
    Finish,
}

/// What a message of a write is; `None` if it is empty.
pub(super) fn write_part(message: &v1::WriteFileRequest) -> Option<Part<'_>> {
    message.kind.as_ref().map(|kind| match kind {
        write_file_request::Kind::Open(_) => Part::Open,
        write_file_request::Kind::Data(data) => Part::Data(data),
        write_file_request::Kind::Finish(_) => Part::Finish,
    })
}

/// What a message of an import is; `None` if it is empty.
pub(super) fn import_part(message: &v1::ImportFilesRequest) -> Option<Part<'_>> {
    message.kind.as_ref().map(|kind| match kind {
        import_files_request::Kind::Open(_) => Part::Open,
        import_files_request::Kind::Data(data) => Part::Data(data),
        import_files_request::Kind::Finish(_) => Part::Finish,
    })
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

/// Sends the caller's messages to the worker and returns its response. The worker publishes a file
/// only when it is complete.
pub(super) async fn upload<M: Send + 'static, R>(
    route: &SessionRoute,
    first: M,
    mut requests: Streaming<M>,
    part: impl Fn(&M) -> Option<Part<'_>>,
    call: impl AsyncFnOnce(Client, Request<ReceiverStream<M>>) -> Result<Response<R>, Status>,
) -> Result<R, ApiError> {
    let holder = route.holder(&mut Retry::new()).await?;
    let (chunks, outgoing) = mpsc::channel(BUFFER);
    // The channel is empty, so there is room.
    let _ = chunks.try_send(first);
    let request = holder.held.request(ReceiverStream::new(outgoing));
    let mut response = pin!(call(route.client(&holder)?, request));
    let response = tokio::select! {
        // A response before the end of the upload is an error.
        response = &mut response => response,
        sent = forward_upload(route, holder.held.session, &mut requests, part, chunks) => {
            sent?;
            response.await
        }
    };
    response.map(Response::into_inner).map_err(|status| route.failure(&holder, &status))
}

/// Forwards an upload. Only `finish` completes the file: a stream that broke looks like one that
/// ended.
async fn forward_upload<M>(
    route: &SessionRoute,
    session: SessionId,
    requests: &mut Streaming<M>,
    part: impl Fn(&M) -> Option<Part<'_>>,
    chunks: mpsc::Sender<M>,
) -> Result<(), ApiError> {
    let mut marked_used = Instant::now();
    loop {
        let Some(message) = next_message(requests).await? else {
            return Err(ApiError::invalid("finish", "must be the last message"));
        };
        let is_last = match part(&message) {
            Some(Part::Data(data)) => {
                request::data(data)?;
                false
            }
            Some(Part::Finish) => true,
            Some(Part::Open) => {
                return Err(ApiError::invalid("open", "only allowed in the first message"));
            }
            None => return Err(ApiError::invalid("kind", "required")),
        };
        // A closed channel means that the worker has responded already.
        if chunks.send(message).await.is_err() || is_last {
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
    let of_data = || {
        let message = format!("data: {STALLED}");
        ApiError::new(Reason::StreamStalled, message).with("field", "data")
    };
    let message = timeout(STALL_TIMEOUT, requests.message()).await.map_err(|_| of_data())?;
    // A caller whose stream broke does not see this error; the partial file is dropped.
    message.map_err(|status| undecodable(&status).unwrap_or_else(of_data))
}

/// The caller does not take what it asked for.
pub(super) fn stalled() -> ApiError {
    ApiError::new(Reason::StreamStalled, STALLED)
}

/// Why a stream of a worker ended: an error that it reported, or a connection that broke.
pub(super) fn broken(status: Status) -> ApiError {
    ApiError::from_worker(&status).unwrap_or_else(|| {
        ApiError::unavailable(format_args!("file stream of the worker broke: {status}"))
    })
}

/// Sends a file or archive to the caller until it ends, the caller disconnects, its deadline passes
/// or the server stops.
pub(super) fn send_download<D: Send + 'static>(
    route: SessionRoute,
    session: SessionId,
    chunks: Streaming<D>,
    deadline: Deadline,
) -> impl Stream<Item = Result<D, Status>> + Send {
    let (sender, receiver) = mpsc::channel(BUFFER);
    task::background("read file", async move {
        let ended = tokio::select! {
            ended = forward_download(&route, session, chunks, &sender) => ended,
            () = sender.closed() => Ok(()),
            () = deadline.passed() => Err(ApiError::deadline_exceeded()),
            () = route.context.stop_streams.cancelled() => Err(ApiError::shutting_down()),
        };
        if let Err(error) = ended
            && sender.try_send(Err(error.into())).is_err()
        {
            tracing::debug!("client did not take the final error");
        }
    });
    ReceiverStream::new(receiver)
}

async fn forward_download<D>(
    route: &SessionRoute,
    session: SessionId,
    mut chunks: Streaming<D>,
    sender: &mpsc::Sender<Result<D, Status>>,
) -> Result<(), ApiError> {
    let mut marked_used = Instant::now();
    while let Some(chunk) = chunks.message().await.map_err(broken)? {
        match sender.send_timeout(Ok(chunk), STALL_TIMEOUT).await {
            Ok(()) => {}
            Err(mpsc::error::SendTimeoutError::Closed(_)) => return Ok(()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                return Err(stalled());
            }
        }
        if marked_used.elapsed() > MARK_USED_INTERVAL {
            route.mark_used(session).await?;
            marked_used = Instant::now();
        }
    }
    Ok(())
}
