//! How calls reach a worker: over a connection, or directly if it runs in this process.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use http::{Request, Response};
use tonic::{body::Body, service::Routes, transport::Channel};
use tower::Service;

/// A worker's services.
#[derive(Debug, Clone)]
pub(crate) enum WorkerTransport {
    /// Over a socket.
    Remote(Channel),
    /// In this process: a call is a call of a function.
    Local(Routes),
}

impl Service<Request<Body>> for WorkerTransport {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            Self::Remote(channel) => Service::<Request<Body>>::poll_ready(channel, cx),
            Self::Local(routes) => {
                Service::<Request<Body>>::poll_ready(routes, cx).map_err(|never| match never {})
            }
        }
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self {
            Self::Remote(channel) => Box::pin(channel.call(request)),
            Self::Local(routes) => {
                let response = routes.call(request);
                Box::pin(async move { response.await.map_err(|never| match never {}) })
            }
        }
    }
}
