//! Attaches to a run at its worker: pushes a new run with the first attach, waits for the offer of
//! its session, and opens the way for the client's input.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use codelia_proto::internal::v1::{
    Attach, AttachRunRequest, AttachRunResponse, attach_run_request::Kind,
};
use codelia_store::Run;
use codelia_telemetry::{Step, backoff::Backoff, metrics};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::{
    context::Context,
    workers::{self, Push},
};

/// Inputs buffered for a slow worker.
const INPUT_BUFFER: usize = 8;
/// How often to try a worker before the row is read again.
const MAX_ATTEMPTS: u32 = 4;
const MIN_RETRY_DELAY: Duration = Duration::from_millis(2);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Sends input to the run's worker; `None` while no worker is attached.
pub(crate) type InputSender = Option<mpsc::Sender<AttachRunRequest>>;

/// Attaches to one run.
#[derive(Debug)]
pub(crate) struct Attacher {
    context: Arc<Context>,
    input: watch::Sender<InputSender>,
    /// Whether the run ends with the attached stream.
    owner: Arc<AtomicBool>,
    /// Pushes a new run with the first attach.
    push: Option<Push>,
    /// The offer of the session of a new run.
    offer: Option<JoinHandle<()>>,
}

impl Attacher {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            input: watch::Sender::new(None),
            owner: Arc::default(),
            push: None,
            offer: None,
        }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Makes the run end with the stream, or not.
    pub(crate) fn set_owner(&self, owner: bool) {
        self.owner.store(owner, Ordering::Relaxed);
    }

    /// Pushes the run, which its worker does not know yet, with the first attach.
    pub(crate) fn set_push(&mut self, push: Push) {
        self.push = Some(push);
    }

    /// Waits for this offer before it retries a worker that does not know the run.
    pub(crate) fn set_offer(&mut self, offer: JoinHandle<()>) {
        self.offer = Some(offer);
    }

    /// Where input goes, and whether the run ends with the stream.
    pub(crate) fn input(&self) -> (watch::Receiver<InputSender>, Arc<AtomicBool>) {
        (self.input.subscribe(), self.owner.clone())
    }

    /// Stops input until the next attach.
    pub(crate) fn close_input(&self) {
        self.input.send_replace(None);
    }

    /// Waits for the offer, if there is one that was not waited for; returns whether there was.
    pub(crate) async fn wait_for_offer(&mut self) -> bool {
        let Some(offer) = self.offer.take() else { return false };
        if let Err(error) = offer.await {
            tracing::debug!(%error, "offer task failed");
        }
        true
    }

    /// Attaches from `position` on; `None` if the worker cannot be reached or does not know the
    /// run.
    pub(crate) async fn attach(
        &mut self,
        run: &Run,
        position: i64,
    ) -> Option<Streaming<AttachRunResponse>> {
        let address = run.worker_address.as_deref()?;
        let mut retry = RetryDelay::default();
        for _ in 0..MAX_ATTEMPTS {
            let (input, requests) = mpsc::channel(INPUT_BUFFER);
            let started = Instant::now();
            let pushes = self.push.is_some();
            let traceparent = self.push.as_ref().and_then(|push| push.traceparent.clone());
            input.try_send(self.request(run, position)).ok()?;
            match self
                .context
                .worker_calls
                .attach(address, ReceiverStream::new(requests), traceparent)
                .await
            {
                Ok(stream) => {
                    if pushes {
                        metrics().step(Step::Dispatch, started.elapsed());
                    }
                    self.input.send_replace(Some(input));
                    return Some(stream);
                }
                Err(error) if error.is_unknown_run() => {
                    if !self.wait_for_offer().await {
                        retry.wait().await;
                    }
                }
                Err(error) => {
                    tracing::debug!(run = %run.id, address, %error, "cannot attach to run at its worker");
                    return None;
                }
            }
        }
        None
    }

    /// The attach request. The first one pushes a new run; if it is lost, the worker's poll finds
    /// the run.
    fn request(&mut self, run: &Run, position: i64) -> AttachRunRequest {
        let start = self.push.take().map(|push| workers::push_request(run, push));
        let owner = self.owner.load(Ordering::Relaxed);
        let attach = Attach { run_id: run.id.to_string(), position, owner, start };
        AttachRunRequest { kind: Some(Kind::Attach(attach)) }
    }
}

/// Delays before a worker is tried or a row is read again: none at first, then a backoff.
#[derive(Debug)]
pub(crate) struct RetryDelay {
    is_first: bool,
    backoff: Backoff,
}

impl Default for RetryDelay {
    fn default() -> Self {
        Self { is_first: true, backoff: Backoff::new(MIN_RETRY_DELAY, MAX_RETRY_DELAY) }
    }
}

impl RetryDelay {
    fn next(&mut self) -> Duration {
        if std::mem::take(&mut self.is_first) { Duration::ZERO } else { self.backoff.next_delay() }
    }

    /// Waits before the next attempt.
    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_delays_grow_from_zero_to_maximum() {
        let mut retry = RetryDelay::default();
        assert_eq!(retry.next(), Duration::ZERO);
        let second = retry.next();
        assert!(second > Duration::ZERO && second < Duration::from_millis(4), "{second:?}");
        let last = (0..20).map(|_| retry.next()).last().unwrap();
        assert!(last > MAX_RETRY_DELAY / 2 && last <= MAX_RETRY_DELAY, "{last:?}");
    }
}
