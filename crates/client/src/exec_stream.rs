//! An `Exec` call: sends stdin, signals and terminal size to a run, receives its events.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    Approval, CancelRunRequest, CloseStdin, Detach, ExecRequest, ExecResponse, GetRunRequest, Run,
    exec_request, run_event::Kind,
};
use codelia_telemetry::task;
use tokio::{io::AsyncReadExt, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::Streaming;

use crate::{
    client::Client, detach_keys::KeyScanner, exit_status, signals::Signals, streams::Streams,
    system::Resizes, terminal,
};

/// Requests that may wait to be sent.
const QUEUE_SIZE: usize = 16;
/// Maximum bytes of stdin in one request.
const MAX_STDIN_BYTES: usize = 64 * 1024;

/// An open `Exec` call. Dropping it stops the tasks that forward input.
#[derive(Debug)]
pub(crate) struct ExecStream {
    events: Streaming<ExecResponse>,
    requests: mpsc::Sender<ExecRequest>,
    progress: Arc<Progress>,
    /// Whether the run ends with this call, unless we detach.
    owns_run: bool,
    /// Cancelled when the user types the keys that detach.
    detached: CancellationToken,
    forwarders: Vec<AbortOnDropHandle<()>>,
}

/// How following a run ended.
#[derive(Debug)]
pub(crate) enum Followed {
    /// The run ended.
    Finished(Box<Run>),
    /// The user detached; the run with this name continues.
    Detached(String),
}

/// State of the run, updated by [`ExecStream::follow`].
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Resource name, once the run is recorded.
    name: OnceLock<String>,
    started: AtomicBool,
}

impl ExecStream {
    /// Opens the call with its first request.
    pub(crate) async fn open(client: &Client, first: exec_request::Kind) -> Result<Self> {
        let (requests, queue) = mpsc::channel(QUEUE_SIZE);
        let owns_run = matches!(first, exec_request::Kind::Start(_));
        requests.send(request(first)).await.context("cannot open the exec stream")?;
        let events = client.runs().exec(ReceiverStream::new(queue)).await?.into_inner();
        Ok(Self {
            events,
            requests,
            progress: Arc::default(),
            owns_run,
            detached: CancellationToken::new(),
            forwarders: Vec::new(),
        })
    }

    /// The state of the run, also after the call.
    pub(crate) fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    fn forward(&mut self, name: &'static str, input: impl Future<Output = ()> + Send + 'static) {
        self.forwarders.push(AbortOnDropHandle::new(task::background(name, input)));
    }

    /// Forwards our stdin to the command.
    pub(crate) fn forward_stdin(&mut self) {
        self.forward("stdin", forward_stdin(self.requests.clone()));
    }

    /// Forwards what is typed on our terminal to the command, until the keys to detach are typed.
    pub(crate) fn forward_terminal(&mut self, scanner: KeyScanner) {
        let typed = forward_terminal(self.requests.clone(), scanner, self.detached.clone());
        self.forward("terminal", typed);
    }

    /// Forwards the size of our terminal, and its changes, to the command's terminal.
    pub(crate) fn forward_terminal_size(&mut self) -> Result<()> {
        let mut resized = Resizes::catch()?;
        let requests = self.requests.clone();
        self.forward("terminal size", async move {
            let send = || requests.send(request(exec_request::Kind::Resize(terminal::size())));
            while send().await.is_ok() && resized.next().await.is_some() {}
        });
        Ok(())
    }

    /// Forwards the first signal to the command once it has started. Earlier and later signals
    /// cancel the run, or `give_up` if the run is not recorded or cannot be canceled.
    pub(crate) fn forward_signals(
        &mut self,
        mut signals: Signals,
        client: Client,
        give_up: CancellationToken,
    ) {
        let requests = self.requests.clone();
        let progress = Arc::clone(&self.progress);
        self.forward("signals", async move {
            let mut is_first = true;
            while let Some(signal) = signals.next().await {
                if is_first && progress.started.load(Ordering::Acquire) {
                    is_first = false;
                    // A closed stream means that the run has ended: nothing to signal.
                    let signal = exec_request::Kind::Signal(signal.number());
                    let _ = requests.send(request(signal)).await;
                } else {
                    cancel(&client, &progress, &give_up).await;
                }
            }
        });
    }

    /// Receives events until the run ends or the user detaches, and writes its output to `streams`.
    pub(crate) async fn follow(
        &mut self,
        streams: &mut Streams,
        client: &Client,
    ) -> Result<Followed> {
        let detached = self.detached.clone();
        loop {
            let response = tokio::select! {
                response = self.events.message() => response?,
                // Not before the run is recorded: it could not be found again.
                () = detached.cancelled(), if self.progress.name.get().is_some() => {
                    return self.detach(client).await.map(Followed::Detached);
                }
            };
            let response = response.context("the server closed the stream before the run ended")?;
            match response.event.and_then(|event| event.kind) {
                Some(Kind::Queued(queued)) => self.progress.set_name(queued.run),
                Some(Kind::Started(_)) => self.progress.started.store(true, Ordering::Release),
                Some(Kind::Output(output)) => streams.write(&output)?,
                Some(Kind::Finished(finished)) => {
                    let run = finished.run.context("the server sent no run record")?;
                    return Ok(Followed::Finished(Box::new(run)));
                }
                Some(Kind::Waiting(waiting)) => {
                    streams.write_note(&format!("waiting for a worker ({})", waiting.message))?;
                }
                Some(Kind::ApprovalNeeded(needed)) => {
                    let approval = needed.approval.unwrap_or_default();
                    streams.write_note(&approval_needed(&approval))?;
                }
                Some(Kind::Violation(violation)) => {
                    streams.write_note(&exit_status::blocked_call(&violation))?;
                }
                Some(Kind::NearLimit(near)) => {
                    if let Some(message) = exit_status::near_limit(&near) {
                        streams.write_note(&message)?;
                    }
                }
                Some(Kind::Assigned(_)) => streams.begin_attempt(),
                Some(Kind::OutputTruncated(_)) | None => {}
            }
        }
    }

    /// Lets the run continue without us. Returns its name.
    async fn detach(&mut self, client: &Client) -> Result<String> {
        let name = self.progress.name.get().cloned().unwrap_or_default();
        if !self.owns_run {
            return Ok(name);
        }
        let closed = "the server closed the stream before the run was detached";
        self.requests.send(request(exec_request::Kind::Detach(Detach {}))).await.context(closed)?;
        // The queue is empty: the request is on its way. A call on the same connection comes after
        // it, so its answer means that the request arrived.
        drop(self.requests.reserve_many(QUEUE_SIZE).await.context(closed)?);
        client.runs().get_run(GetRunRequest { name: name.clone(), ..Default::default() }).await?;
        Ok(name)
    }
}

/// Says that a run waits for a person, and how to decide.
fn approval_needed(approval: &Approval) -> String {
    let Approval { approval_id, message, .. } = approval;
    format!("waiting for approval {approval_id}: {message} (codelia approvals allow {approval_id})")
}

impl Progress {
    fn set_name(&self, run: Option<Run>) {
        if let Some(run) = run {
            self.name.get_or_init(|| run.name);
        }
    }

    /// Resource name of the run's session, once the run is recorded.
    pub(crate) fn session(&self) -> Option<String> {
        let (session, _) = self.name.get()?.split_once("/runs/")?;
        Some(session.to_owned())
    }
}

async fn cancel(client: &Client, progress: &Progress, give_up: &CancellationToken) {
    let Some(name) = progress.name.get() else { return give_up.cancel() };
    let request = CancelRunRequest { name: name.clone(), ..Default::default() };
    if client.runs().cancel_run(request).await.is_err() {
        give_up.cancel();
    }
}

async fn forward_stdin(requests: mpsc::Sender<ExecRequest>) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; MAX_STDIN_BYTES];
    loop {
        // Treat a read error as the end of stdin.
        let count = stdin.read(&mut buffer).await.unwrap_or(0);
        let message = match count {
            0 => exec_request::Kind::CloseStdin(CloseStdin {}),
            _ => exec_request::Kind::Stdin(buffer[..count].to_vec()),
        };
        if requests.send(request(message)).await.is_err() || count == 0 {
            return;
        }
    }
}

/// Forwards typed input. When the terminal ends, the command's input does not: the user is gone.
async fn forward_terminal(
    requests: mpsc::Sender<ExecRequest>,
    mut scanner: KeyScanner,
    detached: CancellationToken,
) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; MAX_STDIN_BYTES];
    while let Ok(count @ 1..) = stdin.read(&mut buffer).await {
        let (input, detaches) = scanner.scan(&buffer[..count]);
        if !input.is_empty()
            && requests.send(request(exec_request::Kind::Stdin(input))).await.is_err()
        {
            return;
        }
        if detaches {
            return detached.cancel();
        }
    }
}

fn request(kind: exec_request::Kind) -> ExecRequest {
    ExecRequest { kind: Some(kind) }
}
