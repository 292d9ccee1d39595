//! A raw HTTP/2 client, for requests that a gRPC client does not send.

use std::{future::poll_fn, net::SocketAddr};

use anyhow::{Context, Result};
use bytes::Bytes;
use h2::{
    SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::Request;
use tokio::{net::TcpSocket, task::JoinSet};
use tonic::Status;

use crate::within;

/// Bytes sent at once.
const PIECE: usize = 16 * 1024;

/// A connection.
#[derive(Debug)]
pub struct Http2 {
    requests: SendRequest<Bytes>,
    _driver: JoinSet<()>,
}

/// A call whose only message is not finished. Dropping it resets its stream.
#[derive(Debug)]
pub struct UnfinishedCall {
    response: ResponseFuture,
    request: SendStream<Bytes>,
    /// Bytes of the message that the server took.
    pub sent: usize,
}

impl Http2 {
    /// Connects from an address of this machine.
    pub async fn connect(from: &str, to: &str) -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(from.parse()?, 0))?;
        let stream = socket.connect(to.parse()?).await?;
        let (requests, connection) = within("the handshake", h2::client::handshake(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move { drop(connection.await) });
        // Proves that the server answers.
        Ok(Self { requests: within("settings", requests.ready()).await?, _driver: driver })
    }

    /// Announces a message and sends the first bytes of it, until the server refuses the call.
    pub async fn unfinished(
        &self,
        path: &str,
        secret: Option<&str>,
        announced: u32,
        bytes: usize,
    ) -> Result<UnfinishedCall> {
        let mut request = Request::post(format!("http://codelia{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(secret) = secret {
            request = request.header("authorization", format!("Bearer {secret}"));
        }
        let mut requests = within("a free stream", self.requests.clone().ready()).await?;
        let (response, mut stream) = requests.send_request(request.body(())?, false)?;
        let header: Bytes = [&[0], announced.to_be_bytes().as_slice()].concat().into();
        stream.send_data(header, false)?;
        let mut call = UnfinishedCall { response, request: stream, sent: 0 };
        within("the bytes are sent or refused", call.send(bytes)).await;
        Ok(call)
    }
}

impl UnfinishedCall {
    async fn send(&mut self, bytes: usize) {
        while self.sent < bytes {
            let wanted = PIECE.min(bytes - self.sent);
            self.request.reserve_capacity(wanted);
            let granted = poll_fn(|context| self.request.poll_capacity(context)).await;
            let Some(Ok(granted)) = granted else { return };
            let piece = Bytes::from(vec![b'x'; granted.min(wanted)]);
            self.sent += piece.len();
            if self.request.send_data(piece, false).is_err() {
                return;
            }
        }
    }

    /// The status with which the server refuses the call.
    pub async fn refused(self) -> Result<Status> {
        let response = within("the response", self.response).await?;
        Status::from_header_map(response.headers()).context("the headers have no status")
    }
}
