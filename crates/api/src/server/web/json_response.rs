//! The response of a JSON call, from that of gRPC.

use std::sync::Arc;

use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, HeaderValue, Response, header, response::Parts};
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::{Value, json};
use tonic::{Code, Status, body::Body};

use super::{
    call::WebCall,
    connect_error,
    message_reader::{MessageReader, prefixed},
    protocol::Protocol,
};
use crate::server::body_limit::Framing;

/// Connect's flag of the last message of a stream.
const END_STREAM: u8 = 2;

/// How the messages of a response are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    One,
    Lines,
    ConnectStream,
}

impl Encoding {
    fn for_call(call: &WebCall) -> Self {
        match call.protocol {
            Protocol::ConnectStream => Self::ConnectStream,
            Protocol::Json | Protocol::JsonLines if call.method.is_server_streaming => Self::Lines,
            Protocol::Json | Protocol::JsonLines => Self::One,
        }
    }

    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::One => "application/json",
            Self::Lines => "application/x-ndjson",
            Self::ConnectStream => "application/connect+json",
        })
    }

    fn message(self, mut json: Vec<u8>) -> Result<Bytes, Status> {
        if self == Self::ConnectStream {
            return prefixed(0, &json);
        }
        json.push(b'\n');
        Ok(json.into())
    }

    /// The end of a stream: Connect's last message, or a line with the error.
    fn end(self, error: Option<Value>) -> Result<Option<Bytes>, Status> {
        match (self, error) {
            (Self::ConnectStream, error) => {
                let end = error.map_or_else(|| json!({}), |error| json!({ "error": error }));
                prefixed(END_STREAM, end.to_string().as_bytes()).map(Some)
            }
            (_, error) => Ok(error.map(|error| format!("{}\n", json!({ "error": error })).into())),
        }
    }
}

/// The response to a call that failed before it began.
pub(crate) fn refuse(call: &WebCall, status: &Status) -> Response<Body> {
    failed(call, Response::new(()).into_parts().0, status)
}

/// The response of a call.
pub(crate) async fn translate(call: Arc<WebCall>, response: Response<Body>) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    let status = Status::from_header_map(&head.headers);
    remove_grpc_headers(&mut head.headers);
    if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
        return failed(&call, head, &status);
    }
    let encoding = Encoding::for_call(&call);
    let mut reader = MessageReader::new(body, Framing::Prefixed);
    if encoding == Encoding::One {
        return match only_message(&call, &mut reader).await {
            Ok(json) => with_body(head, encoding, Body::new(http_body_util::Full::from(json))),
            Err(status) => failed(&call, head, &status),
        };
    }
    with_body(head, encoding, messages(call, encoding, reader))
}

fn remove_grpc_headers(headers: &mut HeaderMap) {
    let names = [
        "grpc-status",
        "grpc-message",
        "grpc-status-details-bin",
        "grpc-encoding",
        "grpc-accept-encoding",
    ];
    for name in names.into_iter().chain([header::CONTENT_LENGTH.as_str()]) {
        headers.remove(name);
    }
}

fn with_body(mut head: Parts, encoding: Encoding, body: Body) -> Response<Body> {
    head.headers.insert(header::CONTENT_TYPE, encoding.content_type());
    Response::from_parts(head, body)
}

/// A failed call: an HTTP status, except for a stream of Connect.
fn failed(call: &WebCall, mut head: Parts, status: &Status) -> Response<Body> {
    let error = connect_error::to_json(&call.schema, status);
    if Encoding::for_call(call) == Encoding::ConnectStream {
        let end = Encoding::ConnectStream.end(Some(error)).ok().flatten().unwrap_or_default();
        return with_body(
            head,
            Encoding::ConnectStream,
            Body::new(http_body_util::Full::from(end)),
        );
    }
    head.status = connect_error::http_status(status.code());
    with_body(head, Encoding::One, Body::new(format!("{error}\n")))
}

/// The message of a response that has one, with the end of the call.
async fn only_message(call: &Arc<WebCall>, reader: &mut MessageReader) -> Result<Vec<u8>, Status> {
    let message = reader.next().await?;
    while reader.next().await?.is_some() {}
    end_of(reader)?;
    let message = message.ok_or_else(|| Status::internal("the response has no message"))?;
    let mut json = call.response(message).await?;
    json.push(b'\n');
    Ok(json)
}

/// How a call ended whose messages were read.
fn end_of(reader: &MessageReader) -> Result<(), Status> {
    match reader.trailers().and_then(Status::from_header_map) {
        Some(status) if status.code() != Code::Ok => Err(status),
        Some(_) => Ok(()),
        None => Err(Status::unavailable("the response ended early")),
    }
}

/// The messages of a stream and its end.
fn messages(call: Arc<WebCall>, encoding: Encoding, reader: MessageReader) -> Body {
    let frames = stream::try_unfold(Some(reader), move |reader| {
        let call = call.clone();
        async move {
            let Some(mut reader) = reader else { return Ok::<_, Status>(None) };
            let ended = match next_json(&call, &mut reader).await {
                Ok(Some(json)) => {
                    return Ok(Some((Frame::data(encoding.message(json)?), Some(reader))));
                }
                Ok(None) => end_of(&reader),
                Err(status) => Err(status),
            };
            let error = ended.err().map(|status| connect_error::to_json(&call.schema, &status));
            Ok(encoding.end(error)?.map(|end| (Frame::data(end), None)))
        }
    });
    Body::new(StreamBody::new(frames))
}

async fn next_json(
    call: &Arc<WebCall>,
    reader: &mut MessageReader,
) -> Result<Option<Vec<u8>>, Status> {
    match reader.next().await? {
        Some(message) => call.response(message).await.map(Some),
        None => Ok(None),
    }
}
