//! The side of `Exec` that a client speaks on: its input goes to the run's worker, and its leaving
//! ends a run that it started and did not detach.

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
use codelia_store::Run;
use codelia_types::{RunId, TenantId};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};
use tonic::{Status, Streaming};

use crate::{
    context::Context,
    request::{self, Deadline},
    runs,
    status::ApiError,
    validate,
    watch::{EVENTS_AHEAD, Ear, Events, Open, Stop, Watcher, last_word, stopped},
};

/// Inputs that wait for a worker; then the client waits.
const INPUTS_AHEAD: usize = 16;
/// How long the first message may take.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);
/// How long what a client said last is looked for after it left.
const LAST_INPUTS: Duration = Duration::from_millis(100);
/// How long a worker's stream is kept after a detach, so that the detach arrives before its end.
const LINGER: Duration = Duration::from_millis(250);

/// What an `Exec` begins with.
pub(crate) enum Opening {
    Start(Box<v1::StartRunRequest>),
    Attach(v1::WatchRunRequest),
}

/// Reads the first message.
pub(crate) async fn opening(requests: &mut Streaming<v1::ExecRequest>) -> Result<Opening, ApiError> {
    let missing = || ApiError::invalid("start", "the first message must be `start` or `attach`");
    let first = timeout(FIRST_MESSAGE, requests.message()).await.map_err(|_| missing())?;
    let first = first.map_err(|status| request::unreadable(&status).unwrap_or_else(missing))?;
    match first.and_then(|message| message.kind) {
        Some(exec_request::Kind::Start(start)) => Ok(Opening::Start(Box::new(start))),
        Some(exec_request::Kind::Attach(attach)) => Ok(Opening::Attach(attach)),
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

/// Checks a later message.
fn input(message: v1::ExecRequest) -> Result<Kind, ApiError> {
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
            Err(ApiError::invalid("start", "only the first message starts"))
        }
        Some(exec_request::Kind::Attach(_)) => {
            Err(ApiError::invalid("attach", "only the first message attaches"))
        }
        None => Err(ApiError::invalid("kind", "is missing")),
    }
}

/// What the client says, on its way to the worker.
pub(crate) struct Inputs {
    requests: Streaming<v1::ExecRequest>,
    ear: watch::Receiver<Ear>,
    /// Cleared once the worker is told that the run goes on without its caller.
    owner: Arc<AtomicBool>,
    /// The end of what the client says ends the run's input: it started the run.
    starts: bool,
    open: bool,
    detached: bool,
    waiting: VecDeque<Kind>,
}

impl Inputs {
    pub(crate) fn new(requests: Streaming<v1::ExecRequest>, watcher: &Watcher, starts: bool) -> Self {
        let (ear, owner) = watcher.line();
        Self { requests, ear, owner, starts, open: true, detached: false, waiting: VecDeque::new() }
    }

    /// Passes inputs on, in order, until there are no more. May be dropped and called again.
    async fn pump(&mut self) -> Result<(), ApiError> {
        loop {
            tokio::select! {
                message = self.requests.message(), if self.open && self.waiting.len() < INPUTS_AHEAD => {
                    self.take(message)?;
                }
                Some(place) = place(&mut self.ear), if !self.waiting.is_empty() => self.send_next(place),
                else => return Ok(()),
            }
        }
    }

    fn take(&mut self, message: Result<Option<v1::ExecRequest>, Status>) -> Result<(), ApiError> {
        match message {
            Ok(Some(message)) => {
                let kind = input(message)?;
                self.detached |= matches!(kind, Kind::Detach(_));
                self.waiting.push_back(kind);
            }
            Ok(None) => {
                self.open = false;
                if self.starts && !self.detached {
                    self.waiting.push_back(Kind::CloseStdin(v1::CloseStdin {}));
                }
            }
            Err(status) => {
                self.open = false;
                request::unreadable(&status).map_or(Ok(()), Err)?;
            }
        }
        Ok(())
    }

    fn send_next(&mut self, place: Place) {
        let kind = self.waiting.pop_front();
        if matches!(kind, Some(Kind::Detach(_))) {
            self.owner.store(false, Ordering::Relaxed);
        }
        place.send(AttachRunRequest { kind });
    }

    /// Looks for what the client said just before it left: it may have detached.
    async fn last(&mut self) {
        if let Ok(Err(error)) = timeout(LAST_INPUTS, self.pump()).await {
            tracing::debug!(?error, "the last input was malformed");
        }
        self.open = false;
    }
}

/// Room for one input on its way to a worker.
type Place = mpsc::OwnedPermit<AttachRunRequest>;

/// Room for one input with the worker that listens, now or later. `None` if none ever will.
async fn place(ear: &mut watch::Receiver<Ear>) -> Option<Place> {
    loop {
        let listening = ear.wait_for(Option::is_some).await.ok()?.clone();
        if let Ok(place) = listening?.reserve_owned().await {
            return Some(place);
        }
        // That worker's stream is broken; the next one may not be.
        ear.changed().await.ok()?;
    }
}

/// Who speaks with which run.
pub(crate) struct Conversation {
    pub(crate) context: Arc<Context>,
    pub(crate) tenant: TenantId,
    pub(crate) out: Events,
    pub(crate) deadline: Deadline,
}

impl Conversation {
    /// Speaks until the run has ended or the client is gone.
    pub(crate) async fn hold(self, watcher: Watcher, run: Run, mut inputs: Inputs) {
        let _open = Open::count();
        let id = run.id;
        // Kept until the end: with it goes the worker's stream, and with that a run that it owns.
        let mut events = pin!(watcher.watch(run));
        let end = tokio::select! {
            end = &mut events => end,
            Err(error) = inputs.pump() => Err(Stop::Failed(error)),
            stop = stopped(&self.context, &self.out, self.deadline) => Err(stop),
        };
        let Err(stop) = end else { return };
        last_word(&self.out, stop).await;
        self.leave(id, inputs).await;
    }

    /// Ends a run that was started here, unless it is to go on.
    async fn leave(self, run: RunId, mut inputs: Inputs) {
        if !inputs.starts {
            return;
        }
        inputs.last().await;
        if !inputs.detached {
            let canceled = runs::cancel(&self.context, &self.tenant, run).await;
            if let Err(error) = canceled {
                tracing::warn!(%run, ?error, "a run whose caller left could not be canceled");
            }
        } else if inputs.owner.load(Ordering::Relaxed) {
            self.hand_over(run, inputs).await;
        } else {
            tokio::time::sleep(LINGER).await;
        }
    }

    /// Tells the worker of a detach that it could not be told while its client was there.
    async fn hand_over(self, run: RunId, mut inputs: Inputs) {
        let Ok(Some(run)) = self.context.store.run_get(&self.tenant, run).await else { return };
        let (out, mut events) = mpsc::channel(EVENTS_AHEAD);
        let watcher = Watcher::new(self.context.clone(), self.tenant, run.output_bytes, out).owning(true);
        (inputs.ear, inputs.owner) = watcher.line();
        let told = async {
            let delivered = inputs.pump().await;
            tokio::time::sleep(LINGER).await;
            delivered
        };
        let nobody = async { while events.recv().await.is_some() {} };
        tokio::select! {
            end = watcher.watch(run) => tracing::debug!(?end, "the run ended before it was handed over"),
            end = told => tracing::debug!(?end, "the run was handed over"),
            () = nobody => {}
            () = self.context.cut.cancelled() => tracing::warn!("a detached run was not handed over"),
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
    fn malformed_inputs_are_refused_by_name() {
        let size = v1::Terminal { columns: 80, rows: 0 };
        for (kind, expected) in [
            (exec_request::Kind::Signal(0), "signal"),
            (exec_request::Kind::Resize(size), "resize.rows"),
            (exec_request::Kind::Stdin(vec![0; 2 << 20]), "stdin"),
            (exec_request::Kind::Start(v1::StartRunRequest::default()), "start"),
            (exec_request::Kind::Attach(v1::WatchRunRequest::default()), "attach"),
        ] {
            let error = input(message(kind)).unwrap_err();
            assert!(matches!(error, ApiError::Invalid { field, .. } if field == expected), "{expected}");
        }
        assert!(input(v1::ExecRequest { kind: None }).is_err());
    }

    #[tokio::test]
    async fn an_input_waits_for_a_worker_that_listens_and_outlives_a_broken_one() {
        let ear = watch::Sender::new(None);
        let mut receiver = ear.subscribe();
        let (_, received) = tokio::join!(
            async { place(&mut receiver).await.map(|place| place.send(AttachRunRequest { kind: None })) },
            async {
                let (broken, _) = mpsc::channel(1);
                ear.send_replace(Some(broken));
                tokio::task::yield_now().await;
                let (working, mut inputs) = mpsc::channel(1);
                ear.send_replace(Some(working));
                inputs.recv().await
            }
        );
        assert!(received.is_some());
    }

    #[tokio::test]
    async fn an_input_is_given_up_when_nobody_will_listen() {
        let (ear, mut receiver) = watch::channel(None);
        drop(ear);
        assert!(place(&mut receiver).await.is_none());
    }
}
