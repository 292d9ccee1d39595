//! Calls to workers. Each one is only a hint: a failure is logged and not retried, because the
//! worker's poll of the store finds what it missed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_proto::{
    duration_to_proto,
    internal::v1::{self as wire, worker_service_client::WorkerServiceClient},
    timestamp_to_proto,
};
use codelia_server::TlsIdentity;
use codelia_store::{Run, SealedEnv, Store, WorkerCandidate};
use codelia_telemetry::{Step, metrics, trace};
use codelia_types::{Incarnation, LeaseEpoch, Mode, RunId, SessionId, WorkerId};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Status, Streaming, service::Routes};

use super::{channels::Channels, error::Error, placement::Placement, transport::WorkerTransport};

const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Longer, because giving up an attach that owns its run ends the run.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

type Client = WorkerServiceClient<WorkerTransport>;

/// Makes calls to workers.
#[derive(Debug)]
pub(crate) struct WorkerCalls {
    store: Store,
    channels: Channels,
    placement: Placement,
}

impl WorkerCalls {
    pub(crate) fn new(store: Store, tls: Option<Arc<TlsIdentity>>, placement: Placement) -> Self {
        Self { store, channels: Channels::new(tls), placement }
    }

    /// Pushes a run to the worker that it is recorded for.
    pub(crate) async fn push(&self, run: &Run, push: Push) {
        let Some(address) = &run.worker_address else { return };
        let started = Instant::now();
        let traceparent = push.traceparent.clone();
        let request = traced(push_request(run, push), traceparent);
        let pushed = self.call(address, async |mut client| client.start_run(request).await).await;
        log_failure("push", address, pushed.map(drop));
        metrics().step(Step::Dispatch, started.elapsed());
    }

    /// Offers a session to workers with free slots, one after the other, until one takes it.
    pub(crate) async fn offer(
        &self,
        session: SessionId,
        mode: Mode,
    ) -> Option<(WorkerId, LeaseEpoch)> {
        let started = Instant::now();
        match self.store.worker_candidates(session, mode).await {
            Ok(candidates) => self.offer_to(session, candidates, false, started).await,
            Err(error) => {
                tracing::warn!(%session, %error, "cannot read workers for session");
                None
            }
        }
    }

    /// Offers a session that was just created to these workers.
    pub(crate) async fn offer_new(
        &self,
        session: SessionId,
        candidates: Vec<WorkerCandidate>,
    ) -> Option<(WorkerId, LeaseEpoch)> {
        self.offer_to(session, candidates, true, Instant::now()).await
    }

    async fn offer_to(
        &self,
        session: SessionId,
        mut candidates: Vec<WorkerCandidate>,
        is_new: bool,
        started: Instant,
    ) -> Option<(WorkerId, LeaseEpoch)> {
        self.placement.sort(&mut candidates);
        for candidate in candidates {
            let request = wire::OfferSessionRequest { session_id: session.to_string(), is_new };
            let request = traced(request, trace::current());
            let response = self
                .call(&candidate.address, async |mut client| client.offer_session(request).await)
                .await;
            match response {
                Ok(response) if response.taken => {
                    trace::step("offer", started.elapsed());
                    return Some((candidate.id, LeaseEpoch(response.lease_epoch)));
                }
                Ok(_) => {}
                Err(error) => log_failure("offer", &candidate.address, Err(error)),
            }
        }
        None
    }

    /// Has the worker that holds a session look for its queued runs.
    pub(crate) async fn wake(&self, address: &str, session: SessionId) {
        let request = wire::OfferSessionRequest { session_id: session.to_string(), is_new: false };
        let sent = self.call(address, async |mut client| client.offer_session(request).await).await;
        log_failure("wake", address, sent.map(drop));
    }

    /// Notifies a worker that a run was cancelled.
    pub(crate) async fn cancel(&self, address: &str, run: RunId, grace: Option<Duration>) {
        let grace = grace.map(duration_to_proto);
        let request = wire::CancelRunRequest { run_id: run.to_string(), grace };
        let sent = self.call(address, async |mut client| client.cancel_run(request).await).await;
        log_failure("cancel", address, sent.map(drop));
    }

    /// Has a worker signal the command of a run. Returns whether the worker executes it.
    pub(crate) async fn signal(
        &self,
        address: &str,
        run: RunId,
        signal: i32,
    ) -> Result<bool, Error> {
        let request = wire::SignalRunRequest { run_id: run.to_string(), signal };
        let sent = self.call(address, async |mut client| client.signal_run(request).await).await;
        Ok(sent?.known)
    }

    /// Has a worker read what a run uses, and its processes if they are wanted.
    pub(crate) async fn usage(
        &self,
        address: &str,
        run: RunId,
        include_processes: bool,
    ) -> Result<wire::GetRunUsageResponse, Error> {
        let request = wire::GetRunUsageRequest { run_id: run.to_string(), include_processes };
        self.call(address, async |mut client| client.get_run_usage(request).await).await
    }

    /// Notifies a worker that a session has ended.
    pub(crate) async fn close(&self, address: &str, session: SessionId) {
        let request = wire::CloseSessionRequest { session_id: session.to_string() };
        let sent = self.call(address, async |mut client| client.close_session(request).await).await;
        log_failure("close", address, sent.map(drop));
    }

    /// Attaches to a run. The timeout covers only the start of the response stream.
    pub(crate) async fn attach(
        &self,
        address: &str,
        requests: ReceiverStream<wire::AttachRunRequest>,
        traceparent: Option<String>,
    ) -> Result<Streaming<wire::AttachRunResponse>, Error> {
        let requests = traced(requests, traceparent);
        self.call_within(ATTACH_TIMEOUT, address, async |mut client| {
            client.attach_run(requests).await
        })
        .await
    }

    /// Calls the worker with this address directly: it runs in this process.
    pub(crate) fn add_local(&self, address: &str, services: Routes) {
        self.channels.add_local(address, services);
    }

    /// The way to a worker.
    pub(crate) fn transport(&self, address: &str) -> Result<WorkerTransport, Error> {
        self.channels.get(address)
    }

    /// Makes the next call to this address open a new channel.
    pub(crate) fn forget_channel(&self, address: &str) {
        self.channels.remove(address);
    }

    async fn call<T>(
        &self,
        address: &str,
        call: impl AsyncFnOnce(Client) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Error> {
        self.call_within(CALL_TIMEOUT, address, call).await
    }

    async fn call_within<T>(
        &self,
        timeout: Duration,
        address: &str,
        call: impl AsyncFnOnce(Client) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Error> {
        let transport = self.channels.get(address)?;
        let client = WorkerServiceClient::new(transport).max_decoding_message_size(MAX_MESSAGE);
        let response = match tokio::time::timeout(timeout, call(client)).await {
            Err(_) => Err(Error::TimedOut),
            Ok(Err(status)) => Err(Error::Refused(status)),
            Ok(Ok(response)) => Ok(response.into_inner()),
        };
        if response.as_ref().is_err_and(Error::breaks_channel) {
            self.channels.remove(address);
        }
        response
    }
}

fn log_failure(call: &'static str, address: &str, result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(call, address, %error, "worker call failed, its poll will catch up");
    }
}

/// What a push of a run says in addition to the run.
#[derive(Debug)]
pub(crate) struct Push {
    /// The worker's incarnation that the run is recorded for.
    pub(crate) incarnation: Incarnation,
    /// The run's secret variables.
    pub(crate) secret_env: Option<SealedEnv>,
    /// The span that the run belongs to.
    pub(crate) traceparent: Option<String>,
}

/// A request that belongs to a span.
fn traced<T>(message: T, traceparent: Option<String>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(Ok(value)) = traceparent.map(|text| text.parse()) {
        request.metadata_mut().insert(trace::TRACEPARENT, value);
    }
    request
}

/// The request that pushes a run to the worker that it is recorded for.
pub(crate) fn push_request(run: &Run, push: Push) -> wire::StartRunRequest {
    wire::StartRunRequest {
        run_id: run.id.to_string(),
        session_id: run.session.to_string(),
        tenant_id: run.tenant.to_string(),
        incarnation: push.incarnation.to_string(),
        lease_epoch: run.lease_epoch.map_or(0, |epoch| epoch.0),
        create_time: Some(timestamp_to_proto(run.created_at)),
        attempt: run.attempt,
        // Without it the worker refuses the push, and its poll reads the run from the store.
        spec: serde_json::to_vec(&run.spec).unwrap_or_default(),
        secret_env: push.secret_env.map(|sealed| sealed.0).unwrap_or_default(),
    }
}
