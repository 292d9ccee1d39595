//! Properties of requests in the protocols of the web. The entry point of the fuzz target panics if
//! one does not hold.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a panic is a finding")]

use std::{
    error::Error as _,
    sync::{Arc, LazyLock},
    time::Duration,
};

use bytes::Bytes;
use futures::stream;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tonic::{Status, body::Body};

use super::{
    call::{WebCall, framing, to_grpc},
    grpc_web,
    layer::json_request,
    message_reader::MessageReader,
    protocol::{Route, route},
    schema::{Method, Schema},
};
use crate::server::body_limit::{Framing, HEADER, LimitedBody, MessageRules, Pace};

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a runtime"));
static SCHEMA: LazyLock<Arc<Schema>> =
    LazyLock::new(|| Arc::new(Schema::load().expect("a schema")));

/// Messages up to this length; a large one would be converted on another thread.
const MAX_MESSAGE: usize = 32 * 1024;
const SMALL_MESSAGE: usize = 64;
/// A negative number of an enum takes eleven bytes, and two characters of JSON.
const MAX_GROWTH: usize = 16;
const MAX_ERROR: usize = 4 * 1024;

/// What the server below receives of a request.
#[derive(Debug)]
struct Received {
    messages: Vec<Bytes>,
    error: Option<String>,
}

/// A request: a line with content type and path, then the body.
pub fn web_request(bytes: &[u8]) {
    let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else { return };
    let (line, body) = (&bytes[..end], &bytes[end + 1..]);
    let Some((content_type, path)) =
        std::str::from_utf8(line).ok().and_then(|line| line.split_once(' '))
    else {
        return;
    };
    check_text_encoding(body);
    let request =
        |body: Body| Request::post(path).header("content-type", content_type).body(body).ok();
    let Some(routed) = request(Body::empty()) else { return };
    let (route, is_text) = match route(&SCHEMA, &routed) {
        Route::Json { method, protocol } => (Some((method, protocol)), false),
        Route::GrpcWeb { is_text } => (None, is_text),
        Route::Grpc => return,
        Route::Answer(answer) => {
            return assert!(answer.status().is_client_error() || answer.status() == 505);
        }
    };
    let receive = |size: usize, max: usize| {
        let body = in_pieces(body, size);
        let request = match &route {
            Some((method, protocol)) => {
                let call = Arc::new(WebCall::new(SCHEMA.clone(), method.clone(), *protocol));
                json_request(request(body)?, &call).ok()?
            }
            None => grpc_web::request(request(body)?, is_text),
        };
        Some(RUNTIME.block_on(received(request, max)))
    };
    for max in [MAX_MESSAGE, SMALL_MESSAGE] {
        let Some(whole) = receive(body.len().max(1), max) else { return };
        for size in [body.len() / 64 + 1, body.len() / 16 + 3] {
            let pieces = receive(size, max).expect("the same head");
            check_pieces(route.as_ref().map(|(method, _)| &**method), &whole, &pieces);
        }
        check_sizes(&whole, body.len(), max, route.is_some());
        if let Some((method, _)) = &route {
            whole.messages.iter().for_each(|message| check_round_trip(method, message));
        }
    }
}

fn in_pieces(body: &[u8], size: usize) -> Body {
    let pieces: Vec<_> = body.chunks(size).map(Bytes::copy_from_slice).collect();
    Body::new(StreamBody::new(stream::iter(
        pieces.into_iter().map(|piece| Ok::<_, Status>(Frame::data(piece))),
    )))
}

/// Reads a request as the layers below do: its size is limited, then it is translated.
async fn received(request: Request<Body>, max_bytes: usize) -> Received {
    let framing = framing(&request);
    let rules = MessageRules {
        max_bytes,
        timeout: Duration::from_secs(60),
        pace: Pace::EachMessage,
        framing,
    };
    let request = to_grpc(request.map(|body| Body::new(LimitedBody::new(body, rules, None))));
    let mut reader = MessageReader::new(request.into_body(), Framing::Prefixed);
    let mut messages = Vec::new();
    loop {
        match reader.next().await {
            Ok(Some(message)) => messages.push(message),
            Ok(None) => return Received { messages, error: None },
            Err(status) => {
                let source = status.source().map(ToString::to_string).unwrap_or_default();
                return Received {
                    messages,
                    error: Some(format!("{} {source}", status.message())),
                };
            }
        }
    }
}

/// The messages are the same however they arrive. Before an error, fewer arrive in larger pieces;
/// of two errors, either may be seen first.
fn check_pieces(method: Option<&Method>, whole: &Received, pieces: &Received) {
    assert_eq!(whole.error.is_some(), pieces.error.is_some(), "{whole:?} {pieces:?}");
    let is_same = |(whole, pieces): (&Bytes, &Bytes)| match method {
        Some(method) => whole == pieces || value(method, whole) == value(method, pieces),
        None => whole == pieces,
    };
    let has_all = match whole.error {
        None => whole.messages.len() == pieces.messages.len(),
        Some(_) => whole.messages.len() <= pieces.messages.len(),
    };
    assert!(
        has_all && whole.messages.iter().zip(&pieces.messages).all(is_same),
        "{whole:?} {pieces:?}"
    );
}

/// No message is larger than allowed, all are bounded by what was sent, and so is the text of an
/// error.
fn check_sizes(received: &Received, sent: usize, max: usize, is_json: bool) {
    let total: usize = received.messages.iter().map(|message| HEADER + message.len()).sum();
    let growth = if is_json { MAX_GROWTH } else { 1 };
    assert!(total <= HEADER + growth * sent, "{total} bytes for {sent}");
    assert!(received.messages.iter().all(|message| message.len() <= growth * max));
    assert!(received.error.as_ref().is_none_or(|error| error.len() <= MAX_ERROR));
}

/// A request in JSON means the same when it is written again.
fn check_round_trip(method: &Method, message: &[u8]) {
    let written = value(method, message);
    let json = serde_json::to_vec(&written).expect("JSON");
    let again = method.request_from_json(&json).expect("JSON that was written");
    assert_eq!(value(method, &again), written);
}

/// A message as JSON. In the message itself, the entries of a map have no order.
fn value(method: &Method, message: &[u8]) -> Value {
    let json = method.request_to_json(message).expect("a message that was encoded");
    serde_json::from_slice(&json).expect("JSON that was written")
}

/// Bytes are the same after base64, however they are encoded and arrive.
fn check_text_encoding(bytes: &[u8]) {
    let collect = |body: Body| RUNTIME.block_on(body.collect()).expect("valid base64").to_bytes();
    let encode = |size: usize| {
        collect(grpc_web::response(Response::new(in_pieces(bytes, size)), true).into_body())
    };
    for (encoded_size, size) in
        [(bytes.len().max(1), 3), (bytes.len() / 64 + 1, bytes.len().max(1)), (5, 7)]
    {
        let text = encode(encoded_size);
        let decoded = grpc_web::request(Request::new(in_pieces(&text, size)), true);
        assert_eq!(collect(decoded.into_body()), bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn web_request_holds_for_mutations() {
        codelia_fuzz::check("web_request", 1000, web_request);
    }
}
