//! Counts the open calls of one connection: a call is open until its response has ended.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt;
use tokio::sync::watch;
use tonic::body::Body;
use tower::Service;

use crate::Source;

/// The calls of a connection.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Calls {
    /// Calls so far.
    pub(crate) begun: u64,
    /// Calls that have not ended.
    pub(crate) open: usize,
}

/// An open call.
#[derive(Debug)]
struct OpenCall(Arc<watch::Sender<Calls>>);

impl OpenCall {
    fn begin(calls: &Arc<watch::Sender<Calls>>) -> Self {
        calls.send_modify(|calls| {
            calls.begun += 1;
            calls.open += 1;
        });
        Self(calls.clone())
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.send_modify(|calls| calls.open -= 1);
    }
}

/// A service that counts its calls and adds their [`Source`].
#[derive(Debug, Clone)]
pub(crate) struct CountedService<S> {
    pub(crate) inner: S,
    pub(crate) calls: Arc<watch::Sender<Calls>>,
    pub(crate) source: Source,
}

impl<S> Service<Request<Body>> for CountedService<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let call = OpenCall::begin(&self.calls);
        request.extensions_mut().insert(self.source);
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await?;
            Ok(hold_until_end(response, call))
        })
    }
}

/// Drops `held` when the response has ended or the client no longer wants it.
pub fn hold_until_end<T: Send + 'static>(response: Response<Body>, held: T) -> Response<Body> {
    response.map(|body| {
        // The body owns the closure, and the closure owns what is held.
        Body::new(body.inspect_frame(move |_| {
            let _held = &held;
        }))
    })
}
