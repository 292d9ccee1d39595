//! Sends the messages of the session's worker to a caller: a file, an archive, or events. A caller
//! that stalls is not waited for indefinitely.

use std::time::Duration;

use codelia_store::{SessionRef, SessionState};
use codelia_telemetry::task;
use codelia_types::{Reason, SessionId};
use futures::Stream;
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::route::SessionRoute;
use crate::{
    error::ApiError,
    server::request::Deadline,
    sessions::lookup,
    stream::{StreamError, send_final_error, stopped},
};

/// Messages buffered for the receiver.
pub(super) const BUFFER: usize = 2;
/// How long a caller may take to send or to receive the next message.
pub(super) const STALL_TIMEOUT: Duration = Duration::from_secs(60);
pub(super) const STALLED: &str = "the stream stalled; start again";
/// How often a long transfer marks its session as used.
pub(super) const MARK_USED_INTERVAL: Duration = Duration::from_secs(1);

/// A stream from the worker that holds a session.
pub(super) struct Download {
    pub(super) route: SessionRoute,
    pub(super) session: SessionId,
    /// Whether it follows changes: then it does not keep the session in use, and ends with it.
    pub(super) is_watch: bool,
}

impl Download {
    /// Sends messages until the last one, the caller disconnects, its deadline passes or the
    /// server stops.
    pub(super) fn send<M: Send + 'static>(
        self,
        messages: Streaming<M>,
        deadline: Deadline,
    ) -> impl Stream<Item = Result<M, Status>> + Send {
        let (sender, receiver) = mpsc::channel(BUFFER);
        let name = if self.is_watch { "watch files" } else { "read file" };
        task::background(name, async move {
            let ended = tokio::select! {
                ended = self.forward(messages, &sender) => ended,
                error = stopped(&self.route.context, &sender, deadline) => Err(error),
            };
            if let Err(error) = ended
                && !self.is_end(&error).await
            {
                send_final_error(&sender, error).await;
            }
        });
        ReceiverStream::new(receiver)
    }

    async fn forward<M>(
        &self,
        mut messages: Streaming<M>,
        sender: &mpsc::Sender<Result<M, Status>>,
    ) -> Result<(), StreamError> {
        let mut marked_used = Instant::now();
        while let Some(message) = messages.message().await.map_err(broken)? {
            sender.send_timeout(Ok(message), STALL_TIMEOUT).await.map_err(not_taken)?;
            if !self.is_watch && marked_used.elapsed() > MARK_USED_INTERVAL {
                self.route.mark_used(self.session).await?;
                marked_used = Instant::now();
            }
        }
        Ok(())
    }

    /// Whether the worker gave a watch up because the session has ended.
    async fn is_end(&self, error: &StreamError) -> bool {
        let is_unavailable = matches!(
            error,
            StreamError::Failed(error) if error.reason() == Reason::Unavailable
        );
        if !self.is_watch || !is_unavailable {
            return false;
        }
        let SessionRoute { context, tenant, .. } = &self.route;
        let found = lookup::find(&context.store, tenant, &SessionRef::Id(self.session)).await;
        found.is_ok_and(|session| session.state == SessionState::Ended)
    }
}

/// Why a stream of a worker ended: an error that it reported, or a connection that broke.
fn broken(status: Status) -> ApiError {
    ApiError::from_worker(&status).unwrap_or_else(|| {
        ApiError::unavailable(format_args!("file stream of the worker broke: {status}"))
    })
}

/// The caller left, or does not take what it asked for.
fn not_taken<M>(error: mpsc::error::SendTimeoutError<M>) -> StreamError {
    match error {
        mpsc::error::SendTimeoutError::Closed(_) => StreamError::ClientGone,
        mpsc::error::SendTimeoutError::Timeout(_) => {
            ApiError::new(Reason::StreamStalled, STALLED).into()
        }
    }
}
