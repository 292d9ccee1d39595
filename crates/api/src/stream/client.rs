//! The client's side of a stream: where messages go, and the reasons to stop that have nothing to do
//! with what is streamed.

use std::time::Duration;

use codelia_proto::v1;
use codelia_telemetry::metrics;
use tokio::sync::mpsc;
use tonic::Status;

use crate::{context::Context, error::ApiError, server::request::Deadline};

/// Events buffered for a slow client; when the buffer is full, only its own stream waits.
pub(crate) const EVENT_BUFFER: usize = 16;
/// How long to wait for a slow client to take the final error.
const FINAL_ERROR_TIMEOUT: Duration = Duration::from_secs(1);

/// Sends events to the client.
pub(crate) type EventSender = mpsc::Sender<Result<v1::RunEvent, Status>>;

/// Why a stream stops before its end.
#[derive(Debug)]
pub(crate) enum StreamError {
    /// The client disconnected.
    ClientGone,
    /// The stream failed.
    Failed(ApiError),
}

impl<E: Into<ApiError>> From<E> for StreamError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Waits until the client disconnects, its deadline passes or the server stops.
pub(crate) async fn stopped<T>(
    context: &Context,
    messages: &mpsc::Sender<Result<T, Status>>,
    deadline: Deadline,
) -> StreamError {
    tokio::select! {
        () = messages.closed() => StreamError::ClientGone,
        () = deadline.passed() => StreamError::Failed(ApiError::deadline_exceeded()),
        () = context.stop_streams.cancelled() => StreamError::Failed(ApiError::shutting_down()),
    }
}

/// Sends the client the error that ends the stream.
pub(crate) async fn send_final_error<T>(
    messages: &mpsc::Sender<Result<T, Status>>,
    error: StreamError,
) {
    if let StreamError::Failed(error) = error
        && messages.send_timeout(Err(error.into()), FINAL_ERROR_TIMEOUT).await.is_err()
    {
        tracing::debug!("client did not take the final error");
    }
}

/// Counts an open stream in the metrics while it exists.
#[derive(Debug)]
pub(crate) struct OpenStream;

impl OpenStream {
    pub(crate) fn count() -> Self {
        metrics().watchers_changed(1);
        Self
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        metrics().watchers_changed(-1);
    }
}
