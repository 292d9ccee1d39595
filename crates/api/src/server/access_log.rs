//! The access log: one line for each call, when its response has ended.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use bytes::Bytes;
use codelia_types::TenantId;
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Frame, SizeHint};
use tokio::time::Instant;
use tonic::{Code, Status, body::Body};

use super::grpc_code::{code_name, grpc_code};

/// The tenant of a call, in the extensions of its request. Authentication sets it.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallTenant(Arc<OnceLock<TenantId>>);

impl CallTenant {
    pub(crate) fn set(&self, tenant: &TenantId) {
        // Set once for each call.
        let _ = self.0.set(tenant.clone());
    }
}

/// What the log line of a call contains. Written when dropped: a call whose caller leaves early has
/// a line too.
#[derive(Debug)]
pub(crate) struct AccessLine {
    pub(crate) method: String,
    pub(crate) tenant: CallTenant,
    pub(crate) request_id: HeaderValue,
    pub(crate) started: Instant,
    /// `None` until the response has ended.
    pub(crate) code: Option<Code>,
}

impl AccessLine {
    /// Adds the line to a response: written with its status when it has ended.
    pub(crate) fn attach(mut self, response: Response<Body>) -> Response<Body> {
        if response.headers().contains_key("grpc-status") {
            self.code = Some(grpc_code(response.headers()));
        }
        response.map(|body| Body::new(LoggedBody { body, line: self }))
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        self.code.get_or_insert(grpc_code(trailers));
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        tracing::info!(
            target: "codelia::access",
            parent: None,
            method = self.method,
            tenant = self.tenant.0.get().map(TenantId::as_str),
            status = code_name(self.code.unwrap_or(Code::Cancelled)),
            seconds = self.started.elapsed().as_secs_f64(),
            request_id = self.request_id.to_str().unwrap_or_default(),
            "call"
        );
    }
}

struct LoggedBody {
    body: Body,
    line: AccessLine,
}

impl http_body::Body for LoggedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.line.trailers(trailers);
                }
            }
            Poll::Ready(Some(Err(status))) => {
                self.line.code.get_or_insert(status.code());
            }
            // Without trailers: a response of HTTP alone.
            Poll::Ready(None) => {
                self.line.code.get_or_insert(Code::Ok);
            }
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
