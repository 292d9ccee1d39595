//! One program that is connected to the socket.

use std::time::Duration;

use anyhow::{Result, bail};
use codelia_proto::v1::{ApprovalReach, ApprovalScope};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::broadcast::error::RecvError,
    time::timeout,
};

use super::{
    Supervisor,
    message::{self, Command, PathScope, SaveScope},
};
use crate::commands::approvals::{self, Decision};

/// Bytes of a line that a program sends.
const MAX_LINE: u64 = 64 * 1024;
/// How long a program may not read what it is sent.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves a program until it leaves, sends a line that is too long, or does not read.
pub(super) async fn serve(supervisor: &Supervisor, stream: UnixStream) {
    let (reader, writer) = stream.into_split();
    let connection = Connection { supervisor, writer, persist: ApprovalScope::Session };
    // The program sees that it is disconnected; it may connect again.
    let _ = connection.run(BufReader::new(reader)).await;
}

struct Connection<'a> {
    supervisor: &'a Supervisor,
    writer: OwnedWriteHalf,
    /// The runs that a persistent decision holds for.
    persist: ApprovalScope,
}

impl Connection<'_> {
    async fn run(mut self, mut reader: BufReader<OwnedReadHalf>) -> Result<()> {
        let (pending, mut events) = self.supervisor.subscribe();
        for request in &pending {
            self.send(request).await?;
        }
        // A line that was read in part, while events are sent.
        let mut line = Vec::new();
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(event) => self.send(&event).await?,
                    Err(RecvError::Lagged(_) | RecvError::Closed) => bail!("too slow"),
                },
                is_whole = read_line(&mut reader, &mut line) => {
                    if !is_whole? {
                        let message = format!("a line has at most {MAX_LINE} bytes and ends with a newline");
                        self.send(&message::error(None, &message)).await?;
                        return Ok(());
                    }
                    self.execute(&line).await?;
                    line.clear();
                }
            }
        }
    }

    async fn send(&mut self, message: &Value) -> Result<()> {
        let line = format!("{message}\n");
        Ok(timeout(WRITE_TIMEOUT, self.writer.write_all(line.as_bytes())).await??)
    }

    async fn execute(&mut self, line: &[u8]) -> Result<()> {
        let command = match serde_json::from_slice(line) {
            Ok(command) => command,
            Err(error) => {
                return self.send(&message::error(None, &format!("not a command: {error}"))).await;
            }
        };
        let (id, allow, reach) = match command {
            Command::Approve { id, scope, persist } => {
                let reach = match scope {
                    // The server takes it for the file, if there is one.
                    PathScope::File => ApprovalReach::Unspecified,
                    PathScope::Dir => ApprovalReach::Directory,
                };
                (id, Some(if persist { self.persist } else { ApprovalScope::Once }), reach)
            }
            Command::Deny { id } => (id, None, ApprovalReach::Unspecified),
            Command::Save { scope } => {
                // Whether the organisation delegates that, the server says about each decision.
                self.persist = match scope {
                    SaveScope::User => ApprovalScope::User,
                    SaveScope::Project => ApprovalScope::Project,
                    SaveScope::Org => ApprovalScope::Tenant,
                };
                return Ok(());
            }
        };
        self.decide(&id, Decision { allow, reach }).await
    }

    /// Decides about a request. That it is decided, every connection learns from the server.
    async fn decide(&mut self, id: &str, decision: Decision) -> Result<()> {
        let name = format!("approvals/{id}");
        match approvals::decide(&self.supervisor.client, name, decision, String::new()).await {
            Ok(approval) => {
                self.supervisor.changed(approval);
                Ok(())
            }
            Err(error) => self.send(&message::error(Some(id), &format!("{error:#}"))).await,
        }
    }
}

/// Reads the rest of a line; `false` if it is too long or the program left. Keeps what was read if
/// it is dropped.
async fn read_line(reader: &mut BufReader<OwnedReadHalf>, line: &mut Vec<u8>) -> Result<bool> {
    let rest = MAX_LINE.saturating_sub(line.len() as u64);
    reader.take(rest).read_until(b'\n', line).await?;
    Ok(line.last() == Some(&b'\n'))
}
