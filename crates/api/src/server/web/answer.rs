//! Short texts for requests that call no method.

use http::{HeaderValue, Response, StatusCode, header};
use tonic::body::Body;

const DOCUMENTATION: &str = "docs/web.md in the repository of Codelia";
const JSON: &str = "POST /codelia.v1.{Service}/{Method} with content-type: application/json";

fn text(status: StatusCode, text: String) -> Response<Body> {
    let mut response = Response::new(Body::new(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

pub(crate) fn about() -> Response<Body> {
    text(
        StatusCode::OK,
        format!(
            "This is the API of Codelia: gRPC, gRPC-Web and JSON.\nCall it with {JSON}.\nSee {DOCUMENTATION}.\n"
        ),
    )
}

pub(crate) fn not_found(path: &str) -> Response<Body> {
    let path: String = path.chars().take(200).collect();
    text(
        StatusCode::NOT_FOUND,
        format!("{path} not found. This is the API of Codelia: {JSON}.\nSee {DOCUMENTATION}.\n"),
    )
}

pub(crate) fn wrong_method(path: &str) -> Response<Body> {
    let mut response = text(
        StatusCode::METHOD_NOT_ALLOWED,
        format!("Call {path} with POST.\nSee {DOCUMENTATION}.\n"),
    );
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
    response
}

pub(crate) fn wrong_content_type() -> Response<Body> {
    const ACCEPTED: &str = "application/json, application/x-ndjson, application/connect+json, \
                            application/grpc-web, application/grpc-web-text, application/grpc";
    let mut response = text(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        format!("The content-type must be one of {ACCEPTED}.\nSee {DOCUMENTATION}.\n"),
    );
    response.headers_mut().insert("accept-post", HeaderValue::from_static(ACCEPTED));
    response
}

pub(crate) fn grpc_needs_http2() -> Response<Body> {
    text(
        StatusCode::HTTP_VERSION_NOT_SUPPORTED,
        format!(
            "gRPC needs HTTP/2, and this request came over HTTP/1.1. Use HTTP/2, gRPC-Web or JSON.\n\
             See {DOCUMENTATION}.\n"
        ),
    )
}

/// As Connect answers a path that is not a method.
pub(crate) fn unknown_method(path: &str) -> Response<Body> {
    let path: String = path.chars().take(200).collect();
    let error =
        serde_json::json!({ "code": "unimplemented", "message": format!("no method {path}") });
    let mut response = Response::new(Body::new(error.to_string()));
    *response.status_mut() = StatusCode::NOT_FOUND;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
