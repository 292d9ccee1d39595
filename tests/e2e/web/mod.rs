//! Callers without a gRPC library: JSON, gRPC-Web, plain HTTP, browsers.

mod answers;
mod browser;
mod grpc_web;
mod json;
mod limits;

use anyhow::Result;
use bytes::Bytes;
use codelia_tests::{Client, Cluster, Http1Response};
use http::Request;
use serde_json::{Value, json};

/// A caller of the first api of a cluster over HTTP/1.1.
struct WebCaller {
    address: String,
    secret: String,
}

impl WebCaller {
    fn new(cluster: &Cluster, client: &Client) -> Self {
        Self { address: cluster.address(0).to_owned(), secret: client.secret.clone() }
    }

    /// Calls a method such as `RunService/StartRun` with a body of some content type.
    async fn call(
        &self,
        method: &str,
        content_type: &str,
        body: impl Into<Bytes>,
    ) -> Result<Http1Response> {
        let request = Request::post(format!("/codelia.v1.{method}"))
            .header("content-type", content_type)
            .header("authorization", format!("Bearer {}", self.secret))
            .body(body.into())?;
        Http1Response::to(&self.address, request).await
    }

    async fn json(&self, method: &str, body: &Value) -> Result<Http1Response> {
        self.call(method, "application/json", body.to_string()).await
    }

    /// Starts a shell script in a session and returns the name of the run.
    async fn start(&self, session: &str, script: &str) -> Result<String> {
        let body = json!({ "parent": session, "command": { "argv": ["sh", "-c", script] } });
        let run = self.json("RunService/StartRun", &body).await?.json().await?;
        Ok(run["run"]["name"].as_str().unwrap_or_default().to_owned())
    }
}

/// A message with the prefix of gRPC, gRPC-Web and Connect.
fn prefixed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0], length.to_be_bytes().as_slice(), message].concat()
}

/// The flags and content of each message of a body.
fn split(mut body: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut messages = Vec::new();
    while let Some((&[flags, ref length @ ..], rest)) = body.split_first_chunk::<5>() {
        let (message, rest) = rest.split_at(u32::from_be_bytes(*length) as usize);
        messages.push((flags, message.to_vec()));
        body = rest;
    }
    assert!(body.is_empty(), "{body:?}");
    messages
}
