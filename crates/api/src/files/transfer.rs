//! Transfers the bytes of a file between a caller and the session's worker, with a small buffer.
//! A caller that stalls is not waited for indefinitely.

use std::{pin::pin, time::Duration};

use codelia_proto::{
    internal::v1::{self as wire, FileRefusalReason as Cause, OpenedFile, write_file_request::Kind},
    v1::{self, write_file_request},
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
use tonic::{Status, Streaming};

use super::{
    error, request,
    route::{Retry, SessionRoute},
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

type Upload = Streaming<v1::WriteFileRequest>;
type ReadResult = Result<v1::ReadFileResponse, Status>;

/// Reads the first message of a write.
pub(super) async fn read_open(requests: &mut Upload) -> Result<v1::WriteFileOpen, ApiError> {
    match next_message(requests).await? {
        Some(write_file_request::Kind::Open(open)) => Ok(open),
        Some(write_file_request::Kind::Data(_) | write_file_request::Kind::Finish(_)) | None => {
            Err(ApiError::invalid("open", "must be the first message"))
        }
    }
}

/// Validates the first message of a write, which names the session.
pub(super) fn check_open(open: v1::WriteFileOpen) -> Result<(SessionRef, v1::WriteFileOpen), ApiError> {
    let within = |error: ApiError| error.within("open");
    let session = resource_name::session("parent", &open.parent).map_err(within)?;
    Ok((session, request::open(open).map_err(within)?))
}

/// Writes a file at the worker, which publishes it only when it is complete.
pub(super) async fn write(
    route: &SessionRoute,
    open: v1::WriteFileOpen,
    mut requests: Upload,
) -> Result<v1::WriteFileResponse, ApiError> {
    let holder = route.holder(&mut Retry::new()).await?;
    let (chunks, outgoing) = mpsc::channel(BUFFER);
    let opened = OpenedFile { session: Some(holder.session.clone()), open: Some(open) };
    // The channel is empty, so there is room.
    let _ = chunks.try_send(message(Kind::Open(opened)));
    let mut client = route.client(&holder)?;
    let mut response = pin!(client.write_file(ReceiverStream::new(outgoing)));
    let response = tokio::select! {
        // A response before the end of the upload is an error.
        response = &mut response => response,
        sent = forward_upload(route, holder.id, &mut requests, chunks) => {
            sent?;
            response.await
        }
    };
    let response = response.map_err(|status| route.failure(&holder, &status))?.into_inner().response;
    response.ok_or_else(|| ApiError::internal("worker returned no file"))
}

/// Forwards an upload. Only `finish` completes the file: a stream that broke looks like one that
/// ended.
async fn forward_upload(
    route: &SessionRoute,
    session: SessionId,
    requests: &mut Upload,
    chunks: mpsc::Sender<wire::WriteFileRequest>,
) -> Result<(), ApiError> {
    let mut marked_used = Instant::now();
    loop {
        let chunk = match next_message(requests).await? {
            Some(write_file_request::Kind::Data(data)) => {
                request::data(&data)?;
                Kind::Data(data)
            }
            Some(write_file_request::Kind::Finish(finish)) => Kind::Finish(finish),
            Some(write_file_request::Kind::Open(_)) => {
                return Err(ApiError::invalid("open", "only allowed in the first message"));
            }
            None => return Err(ApiError::invalid("finish", "must be the last message")),
        };
        let is_last = matches!(chunk, Kind::Finish(_));
        // A closed channel means that the worker has responded already.
        if chunks.send(message(chunk)).await.is_err() || is_last {
            return Ok(());
        }
        if marked_used.elapsed() > MARK_USED_INTERVAL {
            route.mark_used(session).await?;
            marked_used = Instant::now();
        }
    }
}

fn message(kind: Kind) -> wire::WriteFileRequest {
    wire::WriteFileRequest { kind: Some(kind) }
}

/// The caller's next message; `None` at the end of its stream.
async fn next_message(requests: &mut Upload) -> Result<Option<write_file_request::Kind>, ApiError> {
    let stalled = || ApiError::from(FileError::new(Cause::Stalled, "data"));
    let message = timeout(STALL_TIMEOUT, requests.message()).await.map_err(|_| stalled())?;
    // A caller whose stream broke does not see this error; the partial file is dropped.
    let message = message.map_err(|status| undecodable(&status).unwrap_or_else(stalled))?;
    match message {
        None => Ok(None),
        Some(message) => message.kind.map(Some).ok_or_else(|| ApiError::invalid("kind", "required")),
    }
}

/// Sends a file to the caller until it ends, the caller disconnects, its deadline passes or the
/// server stops.
pub(super) fn send_file(
    route: SessionRoute,
    (session, chunks): (SessionId, Streaming<wire::ReadFileResponse>),
    deadline: Deadline,
) -> impl Stream<Item = ReadResult> + Send {
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

async fn forward_download(
    route: &SessionRoute,
    session: SessionId,
    mut chunks: Streaming<wire::ReadFileResponse>,
    sender: &mpsc::Sender<ReadResult>,
) -> Result<(), ApiError> {
    let broken = |status: Status| match error::from_status(&status) {
        Some(error) => error.into(),
        None => ApiError::unavailable(format_args!("file stream of the worker broke: {status}")),
    };
    let mut marked_used = Instant::now();
    while let Some(chunk) = chunks.message().await.map_err(broken)? {
        let chunk = chunk.response.ok_or_else(|| ApiError::internal("worker sent an empty message"))?;
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
