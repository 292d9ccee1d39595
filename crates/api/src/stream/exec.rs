//! The input of `Exec`: forwards what the client sends to the run's worker, and cancels a run that
//! the client started when it disconnects without detaching.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use codelia_proto::{
    internal::v1::{AttachRunRequest, attach_run_request::Kind},
    v1::{self, exec_request},
};
use codelia_store::{Cancellation, Run};
use codelia_types::{RunId, TenantId};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};
use tonic::{Status, Streaming};

use super::{
    attach::InputSender,
    client::{EVENT_BUFFER, EventSender, OpenStream, StreamError, send_final_error, stopped},
    follow::EventStreamer,
};
use crate::{
    context::Context,
    error::ApiError,
    runs::cancel::cancel_run,
    server::request::{self, Deadline},
    wire::validate,
};

/// Inputs buffered for a worker; when the buffer is full, the client waits.
const INPUT_BUFFER: usize = 16;
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to read what a client sent just before it disconnected.
const LAST_INPUT_TIMEOUT: Duration = Duration::from_millis(100);
/// How long the worker's stream stays open after a detach, so that the detach arrives first.
const DETACH_DELAY: Duration = Duration::from_millis(250);

/// The first message of an `Exec`.
pub(crate) enum ExecOpening {
    Start(Box<v1::StartRunRequest>),
    Attach(v1::WatchRunRequest),
}

/// Reads the first message.
pub(crate) async fn read_opening(
    requests: &mut Streaming<v1::ExecRequest>,
) -> Result<ExecOpening, ApiError> {
    let missing = || ApiError::invalid("start", "the first message must be `start` or `attach`");
    let first = timeout(FIRST_MESSAGE_TIMEOUT, requests.message()).await.map_err(|_| missing())?;
    let first = first.map_err(|status| request::undecodable(&status).unwrap_or_else(missing))?;
    match first.and_then(|message| message.kind) {
        Some(exec_request::Kind::Start(start)) => Ok(ExecOpening::Start(Box::new(start))),
        Some(exec_request::Kind::Attach(attach)) => Ok(ExecOpening::Attach(attach)),
        Some(
            exec_request::Kind::Stdin(_)
            | exec_request::Kind::CloseStdin(_)
            | exec_request::Kind::Resize(_)
            | exec_request::Kind::Signal(_)
            | exec_request::Kind::Detach(_),
        )
        | None => Err(missing()),
    }
}

/// Validates a later message.
fn parse_input(message: v1::ExecRequest) -> Result<Kind, ApiError> {
    match message.kind {
        Some(exec_request::Kind::Stdin(bytes)) => {
            validate::stdin(&bytes)?;
            Ok(Kind::Stdin(bytes))
        }
        Some(exec_request::Kind::CloseStdin(close)) => Ok(Kind::CloseStdin(close)),
        Some(exec_request::Kind::Resize(size)) => {
            Ok(Kind::Resize(validate::terminal("resize", size)?.into()))
        }
        Some(exec_request::Kind::Signal(number)) => Ok(Kind::Signal(validate::signal(number)?)),
        Some(exec_request::Kind::Detach(detach)) => Ok(Kind::Detach(detach)),
        Some(exec_request::Kind::Start(_)) => {
            Err(ApiError::invalid("start", "only allowed in the first message"))
        }
        Some(exec_request::Kind::Attach(_)) => {
            Err(ApiError::invalid("attach", "only allowed in the first message"))
        }
        None => Err(ApiError::invalid("kind", "required")),
    }
}

/// Forwards the client's input to the worker.
pub(crate) struct ExecInput {
    requests: Streaming<v1::ExecRequest>,
    worker: watch::Receiver<InputSender>,
    /// Whether the run ends with the worker's stream. Cleared when a detach is sent to the worker.
    owner: Arc<AtomicBool>,
    /// Whether this `Exec` started the run: then the end of its requests closes the run's stdin.
    starts: bool,
    is_open: bool,
    is_detached: bool,
    buffer: VecDeque<Kind>,
}

impl ExecInput {
    pub(crate) fn new(
        requests: Streaming<v1::ExecRequest>,
        streamer: &EventStreamer,
        starts: bool,
    ) -> Self {
        let (worker, owner) = streamer.input();
        let buffer = VecDeque::new();
        Self { requests, worker, owner, starts, is_open: true, is_detached: false, buffer }
    }

    /// Forwards inputs in order until there are no more. Cancel-safe: may be dropped and called
    /// again.
    async fn forward(&mut self) -> Result<(), ApiError> {
        loop {
            tokio::select! {
                message = self.requests.message(), if self.is_open && self.buffer.len() < INPUT_BUFFER => {
                    self.receive(message)?;
                }
                Some(permit) = reserve(&mut self.worker), if !self.buffer.is_empty() => self.send_next(permit),
                else => return Ok(()),
            }
        }
    }

    fn receive(
        &mut self,
        message: Result<Option<v1::ExecRequest>, Status>,
    ) -> Result<(), ApiError> {
        match message {
            Ok(Some(message)) => {
                let kind = parse_input(message)?;
                self.is_detached |= matches!(kind, Kind::Detach(_));
                self.buffer.push_back(kind);
            }
            Ok(None) => {
                self.is_open = false;
                if self.starts && !self.is_detached {
                    self.buffer.push_back(Kind::CloseStdin(v1::CloseStdin {}));
                }
            }
            Err(status) => {
                self.is_open = false;
                request::undecodable(&status).map_or(Ok(()), Err)?;
            }
        }
        Ok(())
    }

    fn send_next(&mut self, permit: InputPermit) {
        let kind = self.buffer.pop_front();
        if matches!(kind, Some(Kind::Detach(_))) {
            self.owner.store(false, Ordering::Relaxed);
        }
        permit.send(AttachRunRequest { kind });
    }

    /// Reads what the client sent just before it disconnected: it may have detached.
    async fn read_last(&mut self) {
        if let Ok(Err(error)) = timeout(LAST_INPUT_TIMEOUT, self.forward()).await {
            tracing::debug!(%error, "last input of the client is malformed");
        }
        self.is_open = false;
    }
}

/// A permit to send one input to the worker.
type InputPermit = mpsc::OwnedPermit<AttachRunRequest>;

/// Waits for a permit of the attached worker; `None` if no worker will be attached any more.
async fn reserve(worker: &mut watch::Receiver<InputSender>) -> Option<InputPermit> {
    loop {
        let sender = worker.wait_for(Option::is_some).await.ok()?.clone();
        if let Ok(permit) = sender?.reserve_owned().await {
            return Some(permit);
        }
        // This worker's stream broke; wait for the next attach.
        worker.changed().await.ok()?;
    }
}

/// One `Exec` call: events to the client, input to the worker.
pub(crate) struct ExecStream {
    pub(crate) context: Arc<Context>,
    pub(crate) tenant: TenantId,
    pub(crate) events: EventSender,
    pub(crate) deadline: Deadline,
}

impl ExecStream {
    /// Streams until the run has ended or the client disconnects.
    pub(crate) async fn run(self, streamer: EventStreamer, run: Run, mut input: ExecInput) {
        let _open = OpenStream::count();
        let id = run.id;
        // Kept until the end: dropping it closes the worker's stream, which ends a run that it
        // owns.
        let mut streaming = pin!(streamer.stream(run));
        let end = tokio::select! {
            end = &mut streaming => end,
            Err(error) = input.forward() => Err(StreamError::Failed(error)),
            error = stopped(&self.context, &self.events, self.deadline) => Err(error),
        };
        let Err(error) = end else { return };
        send_final_error(&self.events, error).await;
        Box::pin(self.disconnect(id, input)).await;
    }

    /// Cancels a run that this call started, unless the client detached.
    async fn disconnect(self, run: RunId, mut input: ExecInput) {
        if !input.starts {
            return;
        }
        input.read_last().await;
        if !input.is_detached {
            if let Err(error) =
                cancel_run(&self.context, &self.tenant, run, &Cancellation::default()).await
            {
                tracing::warn!(%run, %error, "cannot cancel run of a disconnected client");
            }
        } else if input.owner.load(Ordering::Relaxed) {
            self.send_detach(run, input).await;
        } else {
            tokio::time::sleep(DETACH_DELAY).await;
        }
    }

    /// Sends the worker a detach that could not be sent while the client was connected.
    async fn send_detach(self, run: RunId, mut input: ExecInput) {
        let Ok(Some(run)) = self.context.store.run_get(&self.tenant, run).await else { return };
        let (events, mut discarded) = mpsc::channel(EVENT_BUFFER);
        let streamer =
            EventStreamer::new(self.context.clone(), self.tenant, run.output_bytes(), events)
                .owning_run(true);
        (input.worker, input.owner) = streamer.input();
        let send = async {
            let sent = input.forward().await;
            tokio::time::sleep(DETACH_DELAY).await;
            sent
        };
        let discard = async { while discarded.recv().await.is_some() {} };
        tokio::select! {
            _ = streamer.stream(run) => tracing::debug!("run ended before the detach was sent"),
            sent = send => tracing::debug!(error = sent.err().map(tracing::field::display), "detach sent"),
            () = discard => {}
            () = self.context.stop_streams.cancelled() => tracing::warn!("detach not sent, shutting down"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: exec_request::Kind) -> v1::ExecRequest {
        v1::ExecRequest { kind: Some(kind) }
    }

    #[test]
    fn malformed_input_is_rejected_by_field() {
        let size = v1::Terminal { columns: 80, rows: 0 };
        for (kind, expected) in [
            (exec_request::Kind::Signal(0), "signal"),
            (exec_request::Kind::Resize(size), "resize.rows"),
            (exec_request::Kind::Stdin(vec![0; 2 << 20]), "stdin"),
            (exec_request::Kind::Start(v1::StartRunRequest::default()), "start"),
            (exec_request::Kind::Attach(v1::WatchRunRequest::default()), "attach"),
        ] {
            let error = parse_input(message(kind)).unwrap_err();
            assert!(error.invalid_field() == Some(expected), "{expected}");
        }
        assert!(parse_input(v1::ExecRequest { kind: None }).is_err());
    }

    #[tokio::test]
    async fn input_waits_for_next_worker_after_a_broken_one() {
        let worker = watch::Sender::new(None);
        let mut receiver = worker.subscribe();
        let (_, received) = tokio::join!(
            async {
                reserve(&mut receiver)
                    .await
                    .map(|permit| permit.send(AttachRunRequest { kind: None }))
            },
            async {
                let (broken, _) = mpsc::channel(1);
                worker.send_replace(Some(broken));
                tokio::task::yield_now().await;
                let (working, mut inputs) = mpsc::channel(1);
                worker.send_replace(Some(working));
                inputs.recv().await
            }
        );
        assert!(received.is_some());
    }

    #[tokio::test]
    async fn input_ends_when_no_worker_will_attach() {
        let (worker, mut receiver) = watch::channel(None);
        drop(worker);
        assert!(reserve(&mut receiver).await.is_none());
    }
}
