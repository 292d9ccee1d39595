//! One `Exec` call: a conversation with a run.

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{CloseStdin, Detach, ExecRequest, ExecResponse, StartRunRequest, exec_request::Kind};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::{Client, Transcript, within};

/// An open call. Dropped, it is over, and so is a run it started and did not detach from.
#[derive(Debug)]
pub struct Exec {
    requests: mpsc::Sender<ExecRequest>,
    responses: Streaming<ExecResponse>,
    /// What came back so far.
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
        requests.send(first).await.map_err(|_| Status::internal("the call is over"))?;
        let responses = client.runs().exec(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Self { requests, responses, transcript: Transcript::from_position(position) })
    }

    /// Sends a message.
    pub async fn send(&self, kind: Kind) -> Result<()> {
        self.requests.send(ExecRequest { kind: Some(kind) }).await.context("the call is over")
    }

    /// Writes to standard input.
    pub async fn write(&self, bytes: impl Into<Vec<u8>>) -> Result<()> {
        self.send(Kind::Stdin(bytes.into())).await
    }

    /// Ends standard input.
    pub async fn close_stdin(&self) -> Result<()> {
        self.send(Kind::CloseStdin(CloseStdin {})).await
    }

    /// Lets the run go on when this call is over.
    pub async fn detach(&self) -> Result<()> {
        self.send(Kind::Detach(Detach {})).await
    }

    /// Takes the next event; `false` after the last.
    pub async fn advance(&mut self) -> Result<bool, Status> {
        within("the next event", self.take_next()).await
    }

    async fn take_next(&mut self) -> Result<bool, Status> {
        let Some(response) = self.responses.message().await? else { return Ok(false) };
        self.transcript.push(response.event.unwrap_or_default());
        Ok(true)
    }

    /// Reads on until what came back is as wanted.
    pub async fn until(&mut self, what: &str, wanted: impl Fn(&Transcript) -> bool) -> Result<()> {
        while !wanted(&self.transcript) {
            if !self.advance().await? {
                bail!("ended before {what}: {:?}", self.transcript);
            }
        }
        Ok(())
    }

    /// Reads on until the command was started.
    pub async fn until_started(&mut self) -> Result<()> {
        self.until("its start", |seen| seen.started.is_some()).await
    }

    /// Reads on until standard output contains `text`.
    pub async fn until_stdout(&mut self, text: &str) -> Result<()> {
        self.until(text, |seen| seen.stdout_text().contains(text)).await
    }

    /// Reads to the end.
    pub async fn finish(mut self) -> Result<Transcript> {
        while self.advance().await? {}
        self.whole()
    }

    /// Reads to the end, however long nothing comes.
    pub async fn finish_without_timeout(mut self) -> Result<Transcript> {
        while self.take_next().await? {}
        self.whole()
    }

    fn whole(self) -> Result<Transcript> {
        if self.transcript.finished.is_none() {
            bail!("the stream ended without the last event: {:?}", self.transcript);
        }
        Ok(self.transcript)
    }
}
