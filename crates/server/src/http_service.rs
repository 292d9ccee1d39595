//! The kind of service that connections call.

use std::convert::Infallible;

use http::{Request, Response};
use tonic::body::Body;
use tower::Service;

/// A service that answers every request and that each connection has a clone of.
pub trait HttpService:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send + 'static>
    + Clone
    + Send
    + 'static
{
}

impl<S> HttpService for S where
    S: Service<
            Request<Body>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Send + 'static,
        > + Clone
        + Send
        + 'static
{
}
