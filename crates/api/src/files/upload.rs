//! Sends the bytes of a file or archive from a caller to the session's worker, with a small buffer.
//! A caller that stalls is not waited for indefinitely.

use std::pin::pin;

use codelia_types::{Reason, SessionId};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Streaming};

use super::{
    download::{BUFFER, MARK_USED_INTERVAL, STALL_TIMEOUT, STALLED},
    forwarded::{Part, UploadMessage},
    request,
    route::{Retry, SessionRoute},
};
use crate::{error::ApiError, server::request::undecodable};

/// Reads the first message.
pub(super) async fn read_open<M: UploadMessage>(
    messages: &mut Streaming<M>,
) -> Result<M::Open, ApiError> {
    let first = next_message(messages).await?;
    match first.as_ref().map(UploadMessage::part) {
        Some(Some(Part::Open(open))) => Ok(open.clone()),
        Some(None) => Err(ApiError::invalid("kind", "required")),
        Some(Some(_)) | None => Err(ApiError::invalid("open", "must be the first message")),
    }
}

/// Sends the caller's messages to the worker and returns its response. The worker publishes a file
/// only when it is complete.
pub(super) async fn send<M: UploadMessage>(
    route: &SessionRoute,
    first: M,
    mut messages: Streaming<M>,
) -> Result<M::Response, ApiError> {
    let holder = route.holder(&mut Retry::new()).await?;
    let (chunks, outgoing) = mpsc::channel(BUFFER);
    // The channel is empty, so there is room.
    let _ = chunks.try_send(first);
    let request = holder.held.request(ReceiverStream::new(outgoing));
    let mut response = pin!(M::send(route.client(&holder)?, request));
    let response = tokio::select! {
        // A response before the end of the upload is an error.
        response = &mut response => response,
        sent = forward(route, holder.held.session, &mut messages, chunks) => {
            sent?;
            response.await
        }
    };
    response.map(Response::into_inner).map_err(|status| route.failure(&holder, &status))
}

/// Forwards an upload. Only `finish` completes the file: a stream that broke looks like one that
/// ended.
async fn forward<M: UploadMessage>(
    route: &SessionRoute,
    session: SessionId,
    messages: &mut Streaming<M>,
    chunks: mpsc::Sender<M>,
) -> Result<(), ApiError> {
    let mut marked_used = Instant::now();
    loop {
        let Some(message) = next_message(messages).await? else {
            return Err(ApiError::invalid("finish", "must be the last message"));
        };
        let is_last = match message.part() {
            Some(Part::Data(data)) => {
                request::data(data)?;
                false
            }
            Some(Part::Finish) => true,
            Some(Part::Open(_)) => {
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
async fn next_message<M>(messages: &mut Streaming<M>) -> Result<Option<M>, ApiError> {
    let message = timeout(STALL_TIMEOUT, messages.message()).await.map_err(|_| stalled())?;
    // A caller whose stream broke does not see this error; the partial file is dropped.
    message.map_err(|status| undecodable(&status).unwrap_or_else(stalled))
}

/// The caller does not send what it began.
fn stalled() -> ApiError {
    ApiError::new(Reason::StreamStalled, format!("data: {STALLED}")).with("field", "data")
}
