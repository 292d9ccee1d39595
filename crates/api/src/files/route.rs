//! Routes a file call to the worker that holds the session; offers the session if none does.

use std::{sync::Arc, time::Duration};

use codelia_proto::{
    internal::v1::{
        self as wire, call_file_request::Call, worker_file_service_client::WorkerFileServiceClient,
    },
    v1,
};
use codelia_store::{SessionEndReason, SessionRef, SessionState};
use codelia_telemetry::backoff::Backoff;
use codelia_types::{KeyId, RunId, SessionId, TenantId};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Status, Streaming};

use super::error;
use crate::{context::Context, dispatch::WorkerTransport, session_lookup, status::ApiError};

/// How long a session may be without a worker before the call fails.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long applying changes may take before the call fails. The worker continues.
const DECISION_TIMEOUT: Duration = Duration::from_secs(60);
const MIN_RETRY_DELAY: Duration = Duration::from_millis(2);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(200);

pub(super) type Client = WorkerFileServiceClient<WorkerTransport>;

/// Routes calls to one session.
#[derive(Debug)]
pub(crate) struct SessionRoute {
    pub(crate) context: Arc<Context>,
    pub(crate) tenant: TenantId,
    pub(crate) session: SessionRef,
    /// Whether the call changes files.
    pub(crate) writes: bool,
}

/// The worker that holds a session.
#[derive(Debug)]
pub(super) struct SessionHolder {
    pub(super) session: wire::HeldSession,
    pub(super) id: SessionId,
    address: String,
}

impl SessionRoute {
    /// Makes a call with one response.
    pub(super) async fn call(&self, call: &Call) -> Result<wire::CallFileResponse, ApiError> {
        self.call_holder(|mut client, session| {
            let request = wire::CallFileRequest { session: Some(session), call: Some(call.clone()) };
            async move { client.call_file(request).await }
        })
        .await
        .map(|(_, response)| response)
    }

    /// Decides about the changes of a run that the session holds.
    pub(crate) async fn decide_changes(&self, run: RunId, apply: bool, key: KeyId) -> Result<(), ApiError> {
        let deciding = self.call_holder(|mut client, session| {
            let (run_id, key_id) = (run.to_string(), key.to_string());
            let request = wire::DecideChangesRequest { session: Some(session), run_id, apply, key_id };
            async move { client.decide_changes(request).await }
        });
        match timeout(DECISION_TIMEOUT, deciding).await {
            Ok(decided) => decided.map(drop),
            Err(_) => {
                Err(ApiError::unavailable(format_args!("the changes of run {run} are still being moved")))
            }
        }
    }

    /// Opens a file for reading.
    pub(super) async fn read(
        &self,
        request: &v1::ReadFileRequest,
    ) -> Result<(SessionId, Streaming<wire::ReadFileResponse>), ApiError> {
        self.call_holder(|mut client, session| {
            let request = wire::ReadFileRequest { session: Some(session), request: Some(request.clone()) };
            async move { client.read_file(request).await }
        })
        .await
    }

    /// Begins to pack a directory.
    pub(super) async fn export(
        &self,
        request: &v1::ExportFilesRequest,
    ) -> Result<(SessionId, Streaming<wire::ExportFilesResponse>), ApiError> {
        self.call_holder(|mut client, session| {
            let request = wire::ExportFilesRequest { session: Some(session), request: Some(request.clone()) };
            async move { client.export_files(request).await }
        })
        .await
    }

    /// Begins to watch a directory.
    pub(super) async fn watch(
        &self,
        request: &v1::WatchFilesRequest,
    ) -> Result<(SessionId, Streaming<wire::WatchFilesResponse>), ApiError> {
        self.call_holder(|mut client, session| {
            let request = wire::WatchFilesRequest { session: Some(session), request: Some(request.clone()) };
            async move { client.watch_files(request).await }
        })
        .await
    }

    /// Calls the holder. A worker that no longer holds the session has done nothing, so the call is
    /// retried with the next holder.
    async fn call_holder<T, F>(
        &self,
        call: impl Fn(Client, wire::HeldSession) -> F,
    ) -> Result<(SessionId, T), ApiError>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let mut retry = Retry::new();
        loop {
            let holder = self.holder(&mut retry).await?;
            match call(self.client(&holder)?, holder.session.clone()).await {
                Ok(response) => return Ok((holder.id, response.into_inner())),
                Err(status) => match self.failure(&holder, &status) {
                    ApiError::File(error) if error.is_not_held() && retry.wait().await => {}
                    error => return Err(error),
                },
            }
        }
    }

    /// Finds the holder of the session; offers the session until a worker takes it.
    pub(super) async fn holder(&self, retry: &mut Retry) -> Result<SessionHolder, ApiError> {
        loop {
            let Context { store, dispatch, .. } = &*self.context;
            let session = session_lookup::find(store, &self.tenant, &self.session).await?;
            match (session.state, session.end_reason) {
                (SessionState::Open, _) => {}
                (SessionState::Ended, Some(SessionEndReason::DataLost)) => {
                    return Err(ApiError::SessionDataLost);
                }
                (SessionState::Ended, _) => return Err(ApiError::session_ended(&session)),
            }
            if let (true, Some(quarantine)) = (self.writes, session.quarantine) {
                return Err(ApiError::SessionQuarantined { id: session.id, reason: quarantine.reason });
            }
            self.mark_used(session.id).await?;
            if let Some(address) = session.holder_address {
                let held = wire::HeldSession {
                    session_id: session.id.to_string(),
                    tenant_id: self.tenant.to_string(),
                    lease_epoch: session.lease_epoch.0,
                };
                return Ok(SessionHolder { session: held, id: session.id, address });
            }
            if dispatch.offer(session.id, session.spec.mode).await.is_none() && !retry.wait().await {
                return Err(ApiError::unavailable(format_args!("no worker takes session {}", session.id)));
            }
        }
    }

    /// Records that the session is in use, which postpones its idle expiry.
    pub(super) async fn mark_used(&self, id: SessionId) -> Result<(), ApiError> {
        match self.context.store.session_touch(&self.tenant, id).await? {
            true => Ok(()),
            false => Err(session_lookup::ended(&self.context.store, &self.tenant, id).await),
        }
    }

    pub(super) fn client(&self, holder: &SessionHolder) -> Result<Client, ApiError> {
        let transport = self.context.dispatch.transport(&holder.address);
        transport.map(WorkerFileServiceClient::new).map_err(ApiError::unavailable)
    }

    /// Converts a worker's status: an error that it reported, or a worker that cannot be reached.
    pub(super) fn failure(&self, holder: &SessionHolder, status: &Status) -> ApiError {
        if let Some(error) = error::from_status(status) {
            return error.into();
        }
        self.context.dispatch.forget_channel(&holder.address);
        ApiError::unavailable(format_args!("file call to worker {} failed: {status}", holder.address))
    }
}

/// Retries with a backoff until a timeout.
#[derive(Debug)]
pub(super) struct Retry {
    deadline: Instant,
    backoff: Backoff,
}

impl Retry {
    pub(super) fn new() -> Self {
        let backoff = Backoff::new(MIN_RETRY_DELAY, MAX_RETRY_DELAY);
        Self { deadline: Instant::now() + TIMEOUT, backoff }
    }

    /// Waits before the next attempt; returns `false` once the timeout has passed.
    async fn wait(&mut self) -> bool {
        sleep(self.backoff.next_delay()).await;
        Instant::now() < self.deadline
    }
}
