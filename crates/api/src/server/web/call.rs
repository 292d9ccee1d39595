//! One JSON call, and its request as gRPC.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use codelia_store::Caller;
use futures::stream;
use http::Request;
use http_body::Frame;
use http_body_util::StreamBody;
use tonic::{Status, body::Body};

use super::{
    message_reader::{MessageReader, prefixed},
    protocol::Protocol,
    schema::{Method, Schema},
};
use crate::{
    error::ApiError,
    server::body_limit::{Framing, refuse_message},
};

/// Smaller messages are converted where they are: another thread would cost more.
const MAX_INLINE: usize = 64 * 1024;

/// One JSON call.
#[derive(Debug)]
pub(crate) struct WebCall {
    pub(crate) schema: Arc<Schema>,
    pub(crate) method: Arc<Method>,
    pub(crate) protocol: Protocol,
    /// Whose work the conversions are. Set by authentication.
    tenant: OnceLock<String>,
}

impl WebCall {
    pub(crate) fn new(schema: Arc<Schema>, method: Arc<Method>, protocol: Protocol) -> Self {
        Self { schema, method, protocol, tenant: OnceLock::new() }
    }

    /// A message of the request with its gRPC prefix.
    async fn request(self: &Arc<Self>, json: Bytes) -> Result<Bytes, Status> {
        let is_stream = self.method.is_client_streaming;
        let message = self.convert(json, Method::request_from_json).await;
        prefixed(0, &message.map_err(|error| refuse_message(error, is_stream))?)
    }

    /// A message of the response as JSON.
    pub(crate) async fn response(self: &Arc<Self>, message: Bytes) -> Result<Vec<u8>, Status> {
        Ok(self.convert(message, Method::response_to_json).await?)
    }

    /// Converts a message; a large one on a thread that may block, in the tenant's turn.
    async fn convert(
        self: &Arc<Self>,
        message: Bytes,
        conversion: fn(&Method, &[u8]) -> Result<Vec<u8>, ApiError>,
    ) -> Result<Vec<u8>, ApiError> {
        if message.len() <= MAX_INLINE {
            return conversion(&self.method, &message);
        }
        let call = self.clone();
        let tenant = self.tenant.get().map_or("", String::as_str);
        let converted =
            self.schema.conversions().run(tenant, move || conversion(&call.method, &message)).await;
        converted.map_err(ApiError::unavailable)?
    }
}

/// How the messages of a request are delimited.
pub(crate) fn framing<T>(request: &Request<T>) -> Framing {
    request
        .extensions()
        .get::<Arc<WebCall>>()
        .map_or(Framing::Prefixed, |call| call.protocol.framing())
}

/// Turns a JSON request into one of gRPC, below authentication. The body is read when the handler
/// reads it.
pub(crate) fn to_grpc(request: Request<Body>) -> Request<Body> {
    let Some(call) = request.extensions().get::<Arc<WebCall>>().cloned() else { return request };
    if let Some(caller) = request.extensions().get::<Caller>() {
        call.tenant.get_or_init(|| caller.tenant.to_string());
    }
    request.map(|body| {
        let reader = MessageReader::new(body, call.protocol.framing());
        let messages = stream::try_unfold((reader, call), async |(mut reader, call)| {
            let Some(json) = reader.next().await? else { return Ok::<_, Status>(None) };
            let message = call.request(json).await?;
            Ok(Some((Frame::data(message), (reader, call))))
        });
        Body::new(StreamBody::new(messages))
    })
}
