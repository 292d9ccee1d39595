//! Forwards the events of a watch from the session's worker to the caller.

use std::time::Duration;

use codelia_proto::v1;
use codelia_store::{SessionRef, SessionState};
use codelia_telemetry::task;
use codelia_types::{Reason, SessionId};
use futures::Stream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::{
    route::SessionRoute,
    transfer::{broken, stalled},
};
use crate::{error::ApiError, server::request::Deadline, sessions::lookup};

/// Messages buffered for the caller.
const BUFFER: usize = 2;
/// How long a caller may take to receive the next message.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

type Messages = mpsc::Sender<Result<v1::WatchFilesResponse, Status>>;

/// Sends events until the session ends, the caller disconnects, its deadline passes or the server
/// stops.
pub(super) fn send(
    route: SessionRoute,
    session: SessionId,
    events: Streaming<v1::WatchFilesResponse>,
    deadline: Deadline,
) -> impl Stream<Item = Result<v1::WatchFilesResponse, Status>> + Send {
    let (sender, receiver) = mpsc::channel(BUFFER);
    task::background("watch files", async move {
        let ended = tokio::select! {
            ended = forward(events, &sender) => ended,
            () = sender.closed() => Ok(()),
            () = deadline.passed() => Err(ApiError::deadline_exceeded()),
            () = route.context.stop_streams.cancelled() => Err(ApiError::shutting_down()),
        };
        if let Err(error) = ended
            && !is_end(&route, session, &error).await
            && sender.try_send(Err(error.into())).is_err()
        {
            tracing::debug!("client did not take the final error");
        }
    });
    ReceiverStream::new(receiver)
}

async fn forward(
    mut events: Streaming<v1::WatchFilesResponse>,
    sender: &Messages,
) -> Result<(), ApiError> {
    while let Some(message) = events.message().await.map_err(broken)? {
        match sender.send_timeout(Ok(message), STALL_TIMEOUT).await {
            Ok(()) => {}
            Err(mpsc::error::SendTimeoutError::Closed(_)) => return Ok(()),
            Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
                return Err(stalled());
            }
        }
    }
    Ok(())
}

/// Whether the worker gave the watch up because the session has ended.
async fn is_end(route: &SessionRoute, session: SessionId, error: &ApiError) -> bool {
    if error.reason() != Reason::Unavailable {
        return false;
    }
    let found = lookup::find(&route.context.store, &route.tenant, &SessionRef::Id(session)).await;
    found.is_ok_and(|session| session.state == SessionState::Ended)
}
