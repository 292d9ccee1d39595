//! One `Exec` call.

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{
    CloseStdin, Detach, ExecRequest, ExecResponse, StartRunRequest, exec_request::Kind,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::{Client, Transcript, within};

/// An open call. Dropping it ends the call, and the run it started unless it detached.
#[derive(Debug)]
pub struct Exec {
    requests: mpsc::Sender<ExecRequest>,
    responses: Streaming<ExecResponse>,
    /// The events received so far.
    pub transcript: Transcript,
}

impl Exec {
    /// Starts a run.
    pub async fn start(client: &Client, request: StartRunRequest) -> Result<Self, Status> {
        Self::open(client, Kind::Start(request), 0).await
    }

    /// Opens a call with its first message.
    pub async fn open(client: &Client, first: Kind, position: i64) -> Result<Self, Status> {
        let (requests, receiver) = mpsc::channel(16);
        let first = ExecRequest { kind: Some(first) };
        requests.send(first).await.map_err(|_| Status::internal("the call has ended"))?;
        let responses = client.runs().exec(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Self { requests, responses, transcript: Transcript::from_position(position) })
    }

    /// Sends a message.
    pub async fn send(&self, kind: Kind) -> Result<()> {
        self.requests.send(ExecRequest { kind: Some(kind) }).await.context("the call has ended")
    }

    /// Writes to standard input.
    pub async fn write(&self, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.send(Kind::Stdin(bytes.into())).await
    }

    /// Closes standard input.
    pub async fn close_stdin(&self) -> Result<()> {
        self.send(Kind::CloseStdin(CloseStdin {})).await
    }

    /// Detaches, so that the run outlives this call.
    pub async fn detach(&self) -> Result<()> {
        self.send(Kind::Detach(Detach {})).await
    }

    /// Receives the next event. Returns `false` at the end of the stream.
    pub async fn advance(&mut self) -> Result<bool, Status> {
        within("the next event", self.receive_next()).await
    }

    async fn receive_next(&mut self) -> Result<bool, Status> {
        let Some(response) = self.responses.message().await? else { return Ok(false) };
        self.transcript.push(response.event.unwrap_or_default());
        Ok(true)
    }

    /// Receives events until `condition` holds.
    pub async fn until(
        &mut self,
        what: &str,
        condition: impl Fn(&Transcript) -> bool,
    ) -> Result<()> {
        while !condition(&self.transcript) {
            if !self.advance().await? {
                bail!("stream ended before {what}: {:?}", self.transcript);
            }
        }
        Ok(())
    }

    /// Receives events until the command starts.
    pub async fn until_started(&mut self) -> Result<()> {
        self.until("the start of the command", |seen| seen.started.is_some()).await
    }

    /// Receives events until standard output contains `text`.
    pub async fn until_stdout(&mut self, text: &str) -> Result<()> {
        self.until(text, |seen| seen.stdout_text().contains(text)).await
    }

    /// Receives events to the end, each within the timeout.
    pub async fn finish(mut self) -> Result<Transcript> {
        while self.advance().await? {}
        self.into_finished()
    }

    /// Receives events to the end, without a timeout.
    pub async fn finish_without_timeout(mut self) -> Result<Transcript> {
        while self.receive_next().await? {}
        self.into_finished()
    }

    fn into_finished(self) -> Result<Transcript> {
        if self.transcript.finished.is_none() {
            bail!("stream ended without a finished event: {:?}", self.transcript);
        }
        Ok(self.transcript)
    }
}
