//! The messages of a watch, and the pauses between them.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use codelia_proto::v1;
use futures::{Stream, TryStreamExt, stream};
use tokio::time::{sleep_until, timeout};
use tonic::Status;

use super::{super::error::FileError, watcher::Watcher};
use crate::file_work::blocking;

/// How often a quiet watch checks that the session is held and the directory is where it was.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How long events are collected before the next message.
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// A pause is this many times as long as the work before it.
const PAUSE_FACTOR: u32 = 4;

/// A watch and what it has not sent yet.
struct Sending {
    watcher: Watcher,
    messages: VecDeque<v1::WatchFilesResponse>,
    resume_at: Instant,
}

/// The messages of a watch. The first one has no events.
pub(in super::super) fn into_stream(
    watcher: Watcher,
) -> impl Stream<Item = Result<v1::WatchFilesResponse, Status>> + Send {
    let messages = VecDeque::from([v1::WatchFilesResponse::default()]);
    let sending = Sending { watcher, messages, resume_at: Instant::now() };
    stream::try_unfold(sending, |sending| async move { Ok(Some(sending.next().await?)) })
        .map_err(|error: FileError| error.into())
}

impl Sending {
    async fn next(mut self) -> Result<(v1::WatchFilesResponse, Self), FileError> {
        loop {
            if let Some(message) = self.messages.pop_front() {
                return Ok((message, self));
            }
            sleep_until(self.resume_at.into()).await;
            if !self.watcher.has_more() {
                // The work is the same whether there are events or not.
                let _ = timeout(CHECK_INTERVAL, self.watcher.readable()).await;
            }
            let begun = Instant::now();
            let mut watcher = self.watcher;
            let (messages, watcher) =
                blocking(move || watcher.work().map(|messages| (messages, watcher))).await?;
            let pause = (begun.elapsed() * PAUSE_FACTOR).max(MIN_PAUSE);
            self = Self { watcher, messages: messages.into(), resume_at: Instant::now() + pause };
        }
    }
}
