//! Routes a file call to the worker that holds the session; offers the session if none does.

use std::{sync::Arc, time::Duration};

use codelia_proto::{
    HeldSession,
    internal::v1::{DecideChangesRequest, worker_file_service_client::WorkerFileServiceClient},
    v1::file_service_client::FileServiceClient,
};
use codelia_store::{SessionEndReason, SessionRef, SessionState};
use codelia_telemetry::backoff::Backoff;
use codelia_types::{KeyId, Reason, RunId, SessionId, TenantId};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Request, Response, Status};

use crate::{context::Context, error::ApiError, sessions::lookup, workers::WorkerTransport};

/// How long a session may be without a worker before the call fails.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long applying changes may take before the call fails. The worker continues.
const DECISION_TIMEOUT: Duration = Duration::from_secs(60);
const MIN_RETRY_DELAY: Duration = Duration::from_millis(2);
const MAX_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Calls the worker that holds a session.
pub(super) type Client = FileServiceClient<WorkerTransport>;

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
    pub(super) held: HeldSession,
    address: String,
}

impl SessionRoute {
    /// Makes a call with one request; returns the session and the response.
    pub(super) async fn call<Q: Clone, R, F>(
        &self,
        request: &Q,
        call: impl Fn(Client, Request<Q>) -> F,
    ) -> Result<(SessionId, R), ApiError>
    where
        F: Future<Output = Result<Response<R>, Status>>,
    {
        self.call_holder(|transport, held| {
            call(FileServiceClient::new(transport), held.request(request.clone()))
        })
        .await
    }

    /// Decides about the changes of a run that the session holds.
    pub(crate) async fn decide_changes(
        &self,
        run: RunId,
        apply: bool,
        key: KeyId,
    ) -> Result<(), ApiError> {
        let request =
            DecideChangesRequest { run_id: run.to_string(), apply, key_id: key.to_string() };
        let deciding = self.call_holder(|transport, held| {
            let mut worker = WorkerFileServiceClient::new(transport);
            let request = held.request(request.clone());
            async move { worker.decide_changes(request).await }
        });
        match timeout(DECISION_TIMEOUT, deciding).await {
            Ok(decided) => decided.map(drop),
            Err(_) => Err(ApiError::unavailable(format_args!(
                "the changes of run {run} are still being moved"
            ))),
        }
    }

    /// Calls the holder. A worker that no longer holds the session has done nothing, so the call is
    /// retried with the next holder.
    async fn call_holder<T, F>(
        &self,
        call: impl Fn(WorkerTransport, &HeldSession) -> F,
    ) -> Result<(SessionId, T), ApiError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut retry = Retry::new();
        loop {
            let holder = self.holder(&mut retry).await?;
            match call(self.transport(&holder)?, &holder.held).await {
                Ok(response) => return Ok((holder.held.session, response.into_inner())),
                Err(status) => {
                    let may_be_elsewhere = ApiError::from_worker(&status).is_some_and(is_not_held);
                    if !may_be_elsewhere || !retry.wait().await {
                        return Err(self.failure(&holder, &status));
                    }
                }
            }
        }
    }

    /// Finds the holder of the session; offers the session until a worker takes it.
    pub(super) async fn holder(&self, retry: &mut Retry) -> Result<SessionHolder, ApiError> {
        loop {
            let Context { store, worker_calls, .. } = &*self.context;
            let session = lookup::find(store, &self.tenant, &self.session).await?;
            match (session.state, session.end_reason) {
                (SessionState::Open, _) => {}
                (SessionState::Ended, Some(SessionEndReason::DataLost)) => {
                    return Err(ApiError::session_data_lost());
                }
                (SessionState::Ended, _) => return Err(ApiError::session_ended(&session)),
            }
            if let (true, Some(quarantine)) = (self.writes, session.quarantine) {
                return Err(ApiError::session_quarantined(session.id, &quarantine.reason));
            }
            self.mark_used(session.id).await?;
            if let Some(address) = session.holder_address {
                let tenant = self.tenant.clone();
                let held = HeldSession { session: session.id, tenant, epoch: session.lease_epoch };
                return Ok(SessionHolder { held, address });
            }
            if worker_calls.offer(session.id, session.spec.mode).await.is_none()
                && !retry.wait().await
            {
                return Err(ApiError::unavailable(format_args!(
                    "no worker takes session {}",
                    session.id
                )));
            }
        }
    }

    /// Records that the session is in use, which postpones its idle expiry.
    pub(super) async fn mark_used(&self, id: SessionId) -> Result<(), ApiError> {
        match self.context.store.session_touch(&self.tenant, id).await? {
            true => Ok(()),
            false => Err(lookup::ended(&self.context.store, &self.tenant, id).await),
        }
    }

    pub(super) fn client(&self, holder: &SessionHolder) -> Result<Client, ApiError> {
        self.transport(holder).map(FileServiceClient::new)
    }

    fn transport(&self, holder: &SessionHolder) -> Result<WorkerTransport, ApiError> {
        self.context.worker_calls.transport(&holder.address).map_err(ApiError::unavailable)
    }

    /// Converts a worker's status: an error that it reported, or a worker that cannot be reached.
    pub(super) fn failure(&self, holder: &SessionHolder, status: &Status) -> ApiError {
        if let Some(error) = ApiError::from_worker(status) {
            return error;
        }
        self.context.worker_calls.forget_channel(&holder.address);
        ApiError::unavailable(format_args!(
            "file call to worker {} failed: {status}",
            holder.address
        ))
    }
}

/// Whether a worker reports that it does not hold the session; another worker may.
fn is_not_held(error: ApiError) -> bool {
    error.reason() == Reason::Unavailable
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
