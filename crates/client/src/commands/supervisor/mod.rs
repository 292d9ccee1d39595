//! `codelia supervisor`: a Unix socket through which programs of the same user decide about
//! approvals.
//!
//! The supervisor decides nothing and keeps nothing: requests and decisions go through the API, so
//! that they are one queue with `codelia approvals` and every other client. The first decision
//! counts.

mod connection;
mod message;
mod socket;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Result;
use codelia_proto::v1::{Approval, ApprovalState, GetApprovalRequest, WatchApprovalsResponse};
use codelia_telemetry::task;
use serde_json::Value;
use tokio::{
    net::UnixStream,
    sync::{Semaphore, broadcast},
};
use tonic::{Status, Streaming};

use self::socket::Socket;
use super::approvals;
use crate::{args, client::Client, output, resolve, signals};

/// Programs that may be connected at once.
const MAX_CONNECTIONS: usize = 16;
/// Events that wait for a program that reads slowly. It is disconnected when there are more.
const MAX_WAITING: usize = 1024;

/// State that the connections share.
#[derive(Debug)]
struct Supervisor {
    client: Client,
    /// The requests that nobody has decided about, by their ids. The server bounds their number.
    pending: Mutex<BTreeMap<String, Approval>>,
    events: broadcast::Sender<Value>,
}

/// Serves the socket until a signal ends the process.
pub(crate) async fn supervisor(client: &Client, args: &args::Supervisor) -> Result<()> {
    let parent = resolve::parent(client, args.session.as_deref()).await?;
    let stop = signals::shutdown()?;
    let socket = Socket::bind(&args.socket)?;
    let supervisor = Arc::new(Supervisor {
        client: client.clone(),
        pending: Mutex::default(),
        events: broadcast::Sender::new(MAX_WAITING),
    });
    output::write_note(&format!("listening on {}", args.socket.display()));
    let following = approvals::follow(
        client,
        &parent,
        async |stream| Ok(supervisor.follow(stream).await),
        || (),
    );
    tokio::select! {
        result = following => result,
        result = accept(&supervisor, &socket) => result,
        () = stop.cancelled() => Ok(()),
    }
}

async fn accept(supervisor: &Arc<Supervisor>, socket: &Socket) -> Result<()> {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Some(stream) = socket.accept().await? else { continue };
        match permits.clone().try_acquire_owned() {
            Ok(permit) => {
                let supervisor = supervisor.clone();
                task::background("supervisor connection", async move {
                    connection::serve(&supervisor, stream).await;
                    drop(permit);
                });
            }
            Err(_) => refuse(stream).await,
        }
    }
}

async fn refuse(stream: UnixStream) {
    let message = format!("{MAX_CONNECTIONS} programs are connected already");
    let line = format!("{}\n", message::error(None, &message));
    // The line fits in the buffer of a new socket. Nothing can be done if it is not accepted.
    let _ = stream.try_write(line.as_bytes());
}

impl Supervisor {
    fn pending(&self) -> MutexGuard<'_, BTreeMap<String, Approval>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The requests that wait for a decision, and all events after them.
    fn subscribe(&self) -> (Vec<Value>, broadcast::Receiver<Value>) {
        let pending = self.pending();
        (pending.values().map(message::request).collect(), self.events.subscribe())
    }

    /// Follows the approvals until the stream ends, and returns why it did.
    async fn follow(&self, mut stream: Streaming<WatchApprovalsResponse>) -> Status {
        if let Err(status) = self.check_pending().await {
            return status;
        }
        loop {
            match stream.message().await {
                Ok(Some(response)) => self.changed(response.approval.unwrap_or_default()),
                Ok(None) => return Status::unavailable("the server closed the stream"),
                Err(status) => return status,
            }
        }
    }

    /// Finds out what was decided while there was no stream. A new one begins with what is pending.
    async fn check_pending(&self) -> Result<(), Status> {
        let names: Vec<String> =
            self.pending().values().map(|approval| approval.name.clone()).collect();
        for name in names {
            let response =
                self.client.approvals().get_approval(GetApprovalRequest { name }).await?;
            self.changed(response.into_inner().approval.unwrap_or_default());
        }
        Ok(())
    }

    /// Sends what became of an approval to all connections, once.
    fn changed(&self, approval: Approval) {
        let mut pending = self.pending();
        let id = approval.approval_id.clone();
        let event = match approval.state() {
            ApprovalState::Pending if pending.contains_key(&id) => return,
            ApprovalState::Pending => {
                let request = message::request(&approval);
                pending.insert(id, approval);
                request
            }
            _ if pending.remove(&id).is_some() => message::decision(&approval),
            _ => return,
        };
        // Without connections, nobody receives it.
        let _ = self.events.send(event);
    }
}
