//! The layer that translates, around all others.

use std::{
    convert::Infallible,
    future::ready,
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response};
use tonic::body::Body;
use tower::Service;

use super::{
    call::WebCall,
    cors::{Cors, CorsOrigins},
    grpc_headers::set_grpc_headers,
    grpc_web, json_response,
    protocol::{self, Route, route},
    schema::Schema,
};
use crate::error::ApiError;

/// Translates between gRPC and the protocols of the web.
#[derive(Debug, Clone)]
pub(crate) struct WebService<S> {
    schema: Arc<Schema>,
    cors: Arc<Cors>,
    inner: S,
}

impl<S> WebService<S> {
    pub(crate) fn new(schema: Schema, origins: &CorsOrigins, inner: S) -> Self {
        let cors = Cors(origins.clone());
        Self { schema: Arc::new(schema), cors: Arc::new(cors), inner }
    }
}

type ResponseFuture = BoxFuture<'static, Result<Response<Body>, Infallible>>;

impl<S> Service<Request<Body>> for WebService<S>
where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future = ResponseFuture,
        >,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> ResponseFuture {
        let cors = self.cors.headers(request.headers());
        if let Some(preflight) = self.cors.preflight(&request) {
            return answer_with(preflight, cors);
        }
        match route(&self.schema, &request) {
            Route::Grpc => self.inner.call(request),
            Route::Answer(answer) => answer_with(answer, cors),
            Route::GrpcWeb { is_text } => {
                let response = self.inner.call(grpc_web::request(request, is_text));
                Box::pin(async move {
                    let Ok(response) = response.await;
                    Ok(with_headers(grpc_web::response(response, is_text), cors))
                })
            }
            Route::Json { protocol, method } => {
                let call = Arc::new(WebCall::new(self.schema.clone(), method, protocol));
                match json_request(request, &call) {
                    Ok(request) => {
                        let response = self.inner.call(request);
                        Box::pin(async move {
                            let Ok(response) = response.await;
                            Ok(with_headers(json_response::translate(call, response).await, cors))
                        })
                    }
                    Err(error) => answer_with(json_response::refuse(&call, &error.into()), cors),
                }
            }
        }
    }
}

fn answer_with(answer: Response<Body>, headers: HeaderMap) -> ResponseFuture {
    Box::pin(ready(Ok(with_headers(answer, headers))))
}

fn with_headers(mut response: Response<Body>, headers: HeaderMap) -> Response<Body> {
    response.headers_mut().extend(headers);
    response
}

/// The head of a JSON call as gRPC. The body follows after authentication, by
/// [`to_grpc`](super::to_grpc).
pub(crate) fn json_request(
    mut request: Request<Body>,
    call: &Arc<WebCall>,
) -> Result<Request<Body>, ApiError> {
    let timeout = protocol::check_headers(request.headers())?;
    let headers = request.headers_mut();
    set_grpc_headers(headers);
    if let Some(timeout) = timeout {
        headers.insert("grpc-timeout", timeout);
    }
    request.extensions_mut().insert(call.clone());
    Ok(request)
}
