//! The headers of a gRPC request.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Makes the head of a request that of a gRPC call.
pub(super) fn set_grpc_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    for name in ["content-length", "accept-encoding", "grpc-encoding", "grpc-accept-encoding"] {
        headers.remove(HeaderName::from_static(name));
    }
}
