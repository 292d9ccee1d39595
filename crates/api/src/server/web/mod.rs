//! Callers that do not speak gRPC: browsers, `curl`, programs without a gRPC library.
//!
//! [`WebService`] is the outermost layer. It recognizes the protocol of a request, presents the
//! request to the layers below as gRPC, and translates the response, so that authentication and
//! every limit are the same for all protocols. Bodies of JSON are read and parsed by [`to_grpc`],
//! below authentication. Other requests get a short text.

mod answer;
mod call;
mod connect_error;
mod cors;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod grpc_headers;
mod grpc_web;
mod json_response;
mod layer;
mod message_reader;
mod protocol;
mod schema;

pub use self::cors::{CorsOrigins, InvalidOrigin};
pub(crate) use self::{
    call::{framing, to_grpc},
    layer::WebService,
    schema::Schema,
};
