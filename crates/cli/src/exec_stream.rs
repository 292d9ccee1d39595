//! An Exec call: what we say to a run (input, signals, size) and what we hear from it.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CancelRunRequest, CloseStdin, ExecRequest, ExecResponse, Run, exec_request, run_event::Kind,
};
use codelia_telemetry::task;
use tokio::{io::AsyncReadExt, signal::unix::SignalKind, sync::mpsc, task::AbortHandle};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use crate::{client::Client, exit_status, signals::Signals, streams::Streams, terminal};

/// Messages to the run that wait to be sent.
const QUEUE: usize = 16;
/// Most bytes of stdin in one message.
const STDIN_BYTES: usize = 64 * 1024;

/// An open Exec call.
#[derive(Debug)]
pub(crate) struct Conversation {
    events: Streaming<ExecResponse>,
    say: mpsc::Sender<ExecRequest>,
    progress: Arc<Progress>,
    helpers: Helpers,
}

/// What is known of the run so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    name: OnceLock<String>,
    started: AtomicBool,
}

/// Tasks that end with the conversation.
#[derive(Debug, Default)]
struct Helpers(Vec<AbortHandle>);

impl Drop for Helpers {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl Conversation {
    /// Opens the call with its first message.
    pub(crate) async fn open(client: &Client, first: exec_request::Kind) -> Result<Self> {
        let (say, said) = mpsc::channel(QUEUE);
        say.send(request(first)).await.context("the call was not opened")?;
        let events = client.runs().exec(ReceiverStream::new(said)).await?.into_inner();
        Ok(Self { events, say, progress: Arc::default(), helpers: Helpers::default() })
    }

    /// What is known of the run, kept up to date by [`Self::follow`].
    pub(crate) fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.progress)
    }

    /// From here on our stdin is the command's.
    pub(crate) fn pass_stdin(&mut self) {
        let task = task::background("stdin", pass_stdin(self.say.clone()));
        self.helpers.0.push(task.abort_handle());
    }

    /// From here on the command's terminal has the size of ours.
    pub(crate) fn pass_size(&mut self) -> Result<()> {
        let mut changed = tokio::signal::unix::signal(SignalKind::window_change())?;
        let say = self.say.clone();
        let task = task::background("terminal size", async move {
            while changed.recv().await.is_some() {
                if say.send(request(exec_request::Kind::Resize(terminal::size()))).await.is_err() {
                    break;
                }
            }
        });
        self.helpers.0.push(task.abort_handle());
        Ok(())
    }

    /// From here on the signals we get go to the command. One that comes before the command has
    /// started, and each one after the first, cancels the run; `give_up` is canceled if there is no
    /// run yet.
    pub(crate) fn pass_signals(&mut self, mut signals: Signals, client: Client, give_up: CancellationToken) {
        let (say, progress) = (self.say.clone(), self.progress());
        let task = task::background("signals", async move {
            let mut first = true;
            while let Some(signal) = signals.next().await {
                if first && progress.started.load(Ordering::Acquire) {
                    first = false;
                    // The run has ended if nobody hears it; then there is nothing to signal.
                    let _ = say.send(request(exec_request::Kind::Signal(signal))).await;
                } else {
                    cancel(&client, &progress, &give_up).await;
                }
            }
        });
        self.helpers.0.push(task.abort_handle());
    }

    /// Hears everything to the run's end and writes its output to `streams`.
    pub(crate) async fn follow(&mut self, streams: &mut Streams) -> Result<Run> {
        while let Some(heard) = self.events.message().await? {
            match heard.event.and_then(|event| event.kind) {
                Some(Kind::Queued(queued)) => self.progress.recorded(queued.run),
                Some(Kind::Started(_)) => self.progress.started.store(true, Ordering::Release),
                Some(Kind::Output(output)) => streams.write(&output)?,
                Some(Kind::Finished(finished)) => return finished.run.context("the server told no outcome"),
                Some(Kind::Violation(violation)) => {
                    eprintln!("codelia: {}", exit_status::attempt(&violation))
                }
                Some(Kind::Assigned(_) | Kind::OutputTruncated(_)) | None => {}
            }
        }
        anyhow::bail!("the server ended the call before the run had ended")
    }
}

impl Progress {
    fn recorded(&self, run: Option<Run>) {
        if let Some(run) = run {
            self.name.get_or_init(|| run.name);
        }
    }

    /// The run's resource name, once it is recorded.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.get().map(String::as_str)
    }
}

async fn cancel(client: &Client, progress: &Progress, give_up: &CancellationToken) {
    let Some(name) = progress.name() else { return give_up.cancel() };
    let request = CancelRunRequest { name: name.to_owned() };
    if client.runs().cancel_run(request).await.is_err() {
        give_up.cancel();
    }
}

async fn pass_stdin(say: mpsc::Sender<ExecRequest>) {
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; STDIN_BYTES];
    loop {
        // What cannot be read has ended, as far as the command is concerned.
        let count = stdin.read(&mut buffer).await.unwrap_or(0);
        let message = match count {
            0 => exec_request::Kind::CloseStdin(CloseStdin {}),
            _ => exec_request::Kind::Stdin(buffer[..count].to_vec()),
        };
        if say.send(request(message)).await.is_err() || count == 0 {
            return;
        }
    }
}

fn request(kind: exec_request::Kind) -> ExecRequest {
    ExecRequest { kind: Some(kind) }
}
