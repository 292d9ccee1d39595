//! A plain HTTP/1.1 client, as a browser or `curl` has one.

use anyhow::Result;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::{net::TcpStream, task::JoinSet};

use crate::within;

/// A response whose body may still arrive. Dropping it closes the connection.
#[derive(Debug)]
pub struct Http1Response {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    body: Incoming,
    buffer: BytesMut,
    _driver: JoinSet<()>,
}

impl Http1Response {
    /// Sends a request on a connection of its own and waits for the head of the response.
    pub async fn to(address: &str, request: Request<Bytes>) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move { drop(connection.await) });
        let (mut head, body) = request.into_parts();
        head.headers.insert("host", "localhost".parse()?);
        let request = Request::from_parts(head, Full::new(body));
        let (head, body) =
            within("the head of the response", requests.send_request(request)).await?.into_parts();
        let (status, headers) = (head.status.as_u16(), head.headers);
        Ok(Self { status, headers, body, buffer: BytesMut::new(), _driver: driver })
    }

    /// The next line, when it arrives.
    pub async fn line(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                return Ok(Some(String::from_utf8(self.buffer.split_to(end + 1).to_vec())?));
            }
            let Some(frame) = within("the next line", self.body.frame()).await.transpose()? else {
                return Ok(None);
            };
            self.buffer.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
        }
    }

    /// The rest of the body.
    pub async fn bytes(mut self) -> Result<Bytes> {
        self.buffer.extend_from_slice(&within("the body", self.body.collect()).await?.to_bytes());
        Ok(self.buffer.freeze())
    }

    /// The rest of the body as text.
    pub async fn text(self) -> Result<String> {
        Ok(String::from_utf8(self.bytes().await?.to_vec())?)
    }

    /// The rest of the body as JSON.
    pub async fn json(self) -> Result<Value> {
        Ok(serde_json::from_slice(&self.bytes().await?)?)
    }

    /// A header as text. Empty if it is missing.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}
