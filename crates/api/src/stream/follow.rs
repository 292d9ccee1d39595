//! Follows a run until it has ended: reads its row while it is queued, attaches to its worker while
//! it is running. A worker reports the end only once it is stored.

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use codelia_proto::internal::v1::{AttachRunResponse, Committed, attach_run_response::Kind};
use codelia_store::{Run, RunState};
use codelia_telemetry::backoff::Backoff;
use codelia_types::TenantId;
use tokio::{sync::watch, task::JoinHandle};
use tonic::Streaming;

use super::{
    attach::{Attacher, InputSender, RetryDelay},
    client::{EventSender, OpenStream, StreamError, send_final_error, stopped},
    deliver::Delivery,
    waiting::Wait,
};
use crate::{context::Context, server::request::Deadline, workers::Push};

const MIN_QUEUED_DELAY: Duration = Duration::from_millis(10);
const MAX_QUEUED_DELAY: Duration = Duration::from_millis(500);

/// How following a worker's stream ended.
enum Followed {
    /// At the end of the run, which is stored.
    Ended(Box<Run>),
    /// The stream broke after new output.
    Advanced,
    /// The stream broke, or could not be opened, without new output.
    Nothing,
}

/// Streams the events of one run to one client.
#[derive(Debug)]
pub(crate) struct EventStreamer {
    attacher: Attacher,
    delivery: Delivery,
    /// Whether to end after the stored output.
    stored_only: bool,
}

impl EventStreamer {
    /// Streams to a client that wants output from `position` on.
    pub(crate) fn new(
        context: Arc<Context>,
        tenant: TenantId,
        position: i64,
        events: EventSender,
    ) -> Self {
        let delivery = Delivery::new(context.clone(), tenant, position, events);
        Self { attacher: Attacher::new(context), delivery, stored_only: false }
    }

    /// Sets whether to end after the output that is stored, even if the run has not ended.
    pub(crate) fn stored_only(mut self, stored_only: bool) -> Self {
        self.stored_only = stored_only;
        self
    }

    /// Sets whether the client may see what only operators see.
    pub(crate) fn for_operator(mut self, is_operator: bool) -> Self {
        self.delivery.set_operator(is_operator);
        self
    }

    /// Sets whether the run ends with this stream.
    pub(crate) fn owning_run(self, owner: bool) -> Self {
        self.attacher.set_owner(owner);
        self
    }

    /// For a run that was just recorded for its worker: pushes it.
    pub(crate) fn push_to(mut self, push: Push) -> Self {
        self.attacher.set_push(push);
        self
    }

    /// For a run that was just recorded and whose session is being offered: waits for the offer.
    pub(crate) fn after_offer(mut self, offer: JoinHandle<()>) -> Self {
        self.attacher.set_offer(offer);
        self
    }

    /// Where input goes, and whether the run ends with the stream.
    pub(crate) fn input(&self) -> (watch::Receiver<InputSender>, Arc<AtomicBool>) {
        self.attacher.input()
    }

    /// Sends events until the run has ended.
    pub(crate) async fn stream(mut self, mut run: Run) -> Result<(), StreamError> {
        let mut retry = RetryDelay::default();
        let mut queued = Backoff::new(MIN_QUEUED_DELAY, MAX_QUEUED_DELAY);
        let mut wait = Wait::default();
        loop {
            self.delivery.begin(&run).await?;
            match run.state {
                RunState::Ended => return self.delivery.finish(&run).await,
                _ if self.stored_only => {
                    // False: the store never has all that may come.
                    return self.delivery.stored_output(run.id, i64::MAX).await.map(drop);
                }
                RunState::Queued => {
                    self.delivery.held(&run).await?;
                    if !self.attacher.wait_for_offer().await {
                        tokio::time::sleep(queued.next_delay()).await;
                    }
                    if run.approval.is_none() {
                        self.delivery.waiting(&run, &mut wait).await?;
                    }
                }
                RunState::Running => match self.follow(&run).await? {
                    Followed::Ended(run) => return self.delivery.finish(&run).await,
                    Followed::Advanced => {
                        retry = RetryDelay::default();
                        queued.reset();
                        wait = Wait::default();
                    }
                    Followed::Nothing => retry.wait().await,
                },
            }
            run = self.delivery.read_run(run.id).await?;
        }
    }

    async fn follow(&mut self, run: &Run) -> Result<Followed, StreamError> {
        let start = self.delivery.cursor();
        let Some(mut stream) = self.attacher.attach(run, start).await else {
            return Ok(Followed::Nothing);
        };
        let ended = self.forward(run, &mut stream).await?;
        self.attacher.close_input();
        Ok(match ended {
            Some(run) => Followed::Ended(Box::new(run)),
            None if self.delivery.cursor() > start => Followed::Advanced,
            None => Followed::Nothing,
        })
    }

    /// Forwards the worker's messages. Returns the run with its result if the worker reports it,
    /// `None` if the row must be read again.
    async fn forward(
        &mut self,
        run: &Run,
        stream: &mut Streaming<AttachRunResponse>,
    ) -> Result<Option<Run>, StreamError> {
        let mut violations = 0..;
        loop {
            let message = match stream.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(None),
                Err(status) => {
                    tracing::debug!(run = %run.id, %status, "worker stream broke");
                    return Ok(None);
                }
            };
            let is_complete = match message.kind {
                Some(Kind::Event(event)) => {
                    self.delivery.worker_event(run, event, &mut violations).await?
                }
                Some(Kind::StoredUntil(end)) => self.delivery.stored_output(run.id, end).await?,
                Some(Kind::Committed(committed)) => return Ok(ended_run(run, committed)),
                None => true,
            };
            if !is_complete {
                return Ok(None);
            }
        }
    }
}

/// The run with the result that its worker stored; `None` if the row must be read.
fn ended_run(run: &Run, committed: Committed) -> Option<Run> {
    if committed.ended.is_empty() {
        return None;
    }
    serde_json::from_slice(&committed.ended)
        .inspect_err(
            |error| tracing::warn!(run = %run.id, %error, "worker sent an invalid run result"),
        )
        .ok()
        .and_then(|committed| run.ended(committed))
}

/// Streams a run until it has ended, the client disconnects, its deadline passes or the server
/// stops.
pub(crate) async fn watch(streamer: EventStreamer, run: Run, deadline: Deadline) {
    let _open = OpenStream::count();
    let context = streamer.attacher.context().clone();
    let events = streamer.delivery.events().clone();
    let end = tokio::select! {
        end = streamer.stream(run) => end,
        error = stopped(&context, &events, deadline) => Err(error),
    };
    if let Err(error) = end {
        send_final_error(&events, error).await;
    }
}
