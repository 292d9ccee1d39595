//! The way of a file call: to the worker that holds the session, or to one that takes it.

use std::{sync::Arc, time::Duration};

use codelia_proto::{
    internal::v1::{
        self as wire, call_file_request::Call, worker_file_service_client::WorkerFileServiceClient,
    },
    v1,
};
use codelia_store::{SessionEndReason, SessionRef, SessionState};
use codelia_types::{SessionId, TenantId};
use tokio::time::{Instant, sleep};
use tonic::{Status, Streaming, transport::Channel};

use super::error::Refused;
use crate::{context::Context, status::ApiError};

/// How long a session may be without a worker before the caller is told to come again.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between looks at a session that nobody holds.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

pub(super) type Client = WorkerFileServiceClient<Channel>;

/// The way to one session.
#[derive(Debug)]
pub(super) struct Road {
    pub(super) context: Arc<Context>,
    pub(super) tenant: TenantId,
    pub(super) session: SessionRef,
}

/// The worker that holds the session.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) session: wire::HeldSession,
    pub(super) id: SessionId,
    address: String,
}

impl Road {
    /// Makes a call with one answer.
    pub(super) async fn call(&self, call: &Call) -> Result<wire::CallFileResponse, ApiError> {
        self.ask(|mut client, session| {
            let request = wire::CallFileRequest { session: Some(session), call: Some(call.clone()) };
            async move { client.call_file(request).await }
        })
        .await
        .map(|(_, answer)| answer)
    }

    /// Opens a file for reading.
    pub(super) async fn read(
        &self,
        request: &v1::ReadFileRequest,
    ) -> Result<(SessionId, Streaming<wire::ReadFileResponse>), ApiError> {
        self.ask(|mut client, session| {
            let request = wire::ReadFileRequest { session: Some(session), request: Some(request.clone()) };
            async move { client.read_file(request).await }
        })
        .await
    }

    /// Asks the holder; the next one if it is none (any more). That is sure not to have done anything.
    async fn ask<T, F>(
        &self,
        call: impl Fn(Client, wire::HeldSession) -> F,
    ) -> Result<(SessionId, T), ApiError>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let mut pause = Pause::new();
        loop {
            let holder = self.holder(&mut pause).await?;
            match call(self.client(&holder)?, holder.session.clone()).await {
                Ok(answer) => return Ok((holder.id, answer.into_inner())),
                Err(status) => match self.failure(&holder, &status) {
                    ApiError::File(refused) if refused.is_not_held() && pause.wait().await => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// Finds who holds the session; offers it to somebody if nobody does.
    pub(super) async fn holder(&self, pause: &mut Pause) -> Result<Holder, ApiError> {
        loop {
            let Context { store, dispatch, .. } = &*self.context;
            let session = store.session_get(&self.tenant, &self.session).await?.ok_or(ApiError::NotFound)?;
            match (session.state, session.end_reason) {
                (SessionState::Open, _) => {}
                (SessionState::Ended, Some(SessionEndReason::DataLost)) => {
                    return Err(ApiError::SessionDataLost);
                }
                (SessionState::Ended, _) => return Err(ApiError::SessionEnded),
            }
            self.used(session.id).await?;
            if let Some(address) = session.holder_address {
                let held = wire::HeldSession {
                    session_id: session.id.to_string(),
                    tenant_id: self.tenant.to_string(),
                    lease_epoch: session.lease_epoch.0,
                };
                return Ok(Holder { session: held, id: session.id, address });
            }
            if dispatch.offer(session.id, session.spec.mode).await.is_none() && !pause.wait().await {
                return Err(ApiError::Unavailable {
                    detail: format!("no worker takes session {}", session.id),
                });
            }
        }
    }

    /// Notes that the session is in use.
    pub(super) async fn used(&self, id: SessionId) -> Result<(), ApiError> {
        match self.context.store.session_use(&self.tenant, id).await? {
            true => Ok(()),
            false => Err(ApiError::SessionEnded),
        }
    }

    pub(super) fn client(&self, holder: &Holder) -> Result<Client, ApiError> {
        let channel = self.context.dispatch.channel(&holder.address);
        channel
            .map(WorkerFileServiceClient::new)
            .map_err(|error| ApiError::Unavailable { detail: error.to_string() })
    }

    /// What a worker's status means: its refusal, or that it cannot be reached.
    pub(super) fn failure(&self, holder: &Holder, status: &Status) -> ApiError {
        if let Some(refused) = Refused::read(status) {
            return refused.into();
        }
        self.context.dispatch.forget(&holder.address);
        ApiError::Unavailable { detail: format!("a worker does not answer a file call: {status}") }
    }
}

/// Ever longer pauses, until there was enough of them.
#[derive(Debug)]
pub(super) struct Pause {
    until: Instant,
    next: Duration,
}

impl Pause {
    pub(super) fn new() -> Self {
        Self { until: Instant::now() + PATIENCE, next: FIRST_PAUSE }
    }

    /// Waits; `false` if there was enough of it.
    async fn wait(&mut self) -> bool {
        sleep(self.next).await;
        self.next = (self.next * 2).min(LONGEST_PAUSE);
        Instant::now() < self.until
    }
}
