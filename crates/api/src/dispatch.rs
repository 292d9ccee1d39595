//! The way to workers: one channel for each address, and the calls on it.
//!
//! A call is a hint. One that fails is logged and forgotten: the worker's poll finds what it missed.

use std::{
    collections::HashMap,
    fmt,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use codelia_proto::{
    internal::v1::{self as wire, worker_service_client::WorkerServiceClient},
    timestamp_to_proto,
};
use codelia_store::{Run, Store, WorkerCandidate};
use codelia_telemetry::{Step, metrics};
use codelia_types::{Incarnation, LeaseEpoch, Mode, RunId, SessionId, WorkerId};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Status, Streaming,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use crate::options::InternalTls;

/// How long a hint may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a worker may take to answer an attach. Longer: giving up one that owns a run ends the run.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);
/// A channel nobody used for so long leads to a worker that is gone.
const UNUSED_FOR: Duration = Duration::from_secs(600);
/// The name in every worker's certificate.
const SERVER_NAME: &str = "codelia-worker";
/// A stalled watcher holds back at most this much of the connection it shares with others …
const STREAM_WINDOW: u32 = 256 * 1024;
/// … which is large enough for thousands of stalled ones.
const CONNECTION_WINDOW: u32 = 1024 * 1024 * 1024;
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

type Client = WorkerServiceClient<Channel>;

/// Why a worker could not be asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{address:?} is no address of a worker")]
    Address { address: String },
    #[error("the worker's address needs TLS, and none is configured")]
    NoTls,
    #[error("the channel cannot be made")]
    Channel(#[from] tonic::transport::Error),
    #[error("the worker did not answer in time")]
    TimedOut,
    #[error("the worker refused: {}", .0.message())]
    Refused(Status),
    #[error("the run's specification cannot be written")]
    Spec(#[from] serde_json::Error),
}

struct Known {
    channel: Channel,
    used: Instant,
}

/// The way to workers.
pub(crate) struct Dispatch {
    store: Store,
    tls: Option<InternalTls>,
    channels: Mutex<HashMap<String, Known>>,
}

impl fmt::Debug for Dispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatch").finish_non_exhaustive()
    }
}

impl Dispatch {
    pub(crate) fn new(store: Store, tls: Option<InternalTls>) -> Self {
        Self { store, tls, channels: Mutex::default() }
    }

    /// Pushes a run to the worker it is recorded for.
    pub(crate) async fn push(&self, run: &Run, incarnation: Incarnation) {
        let Some(address) = &run.worker_address else { return };
        let started = Instant::now();
        let pushed = match push_request(run, incarnation) {
            Ok(request) => {
                self.ask(address, async |mut client| client.start_run(request).await).await.map(drop)
            }
            Err(error) => Err(error),
        };
        log_failure("push", address, pushed);
        metrics().step(Step::Dispatch, started.elapsed());
    }

    /// Offers a session to a worker with room, and to another if it does not take it.
    pub(crate) async fn offer(&self, session: SessionId, mode: Mode) -> Option<(WorkerId, LeaseEpoch)> {
        let candidates = match self.store.worker_candidates(session, mode).await {
            Ok(candidates) => candidates,
            Err(error) => {
                tracing::warn!(%error, "no candidates could be read");
                return None;
            }
        };
        for candidate in by_load(candidates) {
            let request = wire::OfferSessionRequest { session_id: session.to_string() };
            let answer =
                self.ask(&candidate.address, async |mut client| client.offer_session(request).await).await;
            match answer {
                Ok(answer) if answer.taken => return Some((candidate.id, LeaseEpoch(answer.lease_epoch))),
                Ok(_) => {}
                Err(error) => log_failure("offer", &candidate.address, Err(error)),
            }
        }
        None
    }

    /// Tells a worker that a run's end is asked for.
    pub(crate) async fn cancel(&self, address: &str, run: RunId) {
        let request = wire::CancelRunRequest { run_id: run.to_string() };
        let told = self.ask(address, async |mut client| client.cancel_run(request).await).await;
        log_failure("cancel", address, told.map(drop));
    }

    /// Tells a worker that a session has ended.
    pub(crate) async fn close(&self, address: &str, session: SessionId) {
        let request = wire::CloseSessionRequest { session_id: session.to_string() };
        let told = self.ask(address, async |mut client| client.close_session(request).await).await;
        log_failure("close", address, told.map(drop));
    }

    /// Speaks with a run. The answer is open-ended; only its beginning is timed.
    pub(crate) async fn attach(
        &self,
        address: &str,
        requests: ReceiverStream<wire::AttachRunRequest>,
    ) -> Result<Streaming<wire::AttachRunResponse>, Error> {
        self.ask_for(ATTACH_PATIENCE, address, async |mut client| client.attach_run(requests).await).await
    }

    async fn ask<T>(
        &self,
        address: &str,
        call: impl AsyncFnOnce(Client) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Error> {
        self.ask_for(PATIENCE, address, call).await
    }

    async fn ask_for<T>(
        &self,
        patience: Duration,
        address: &str,
        call: impl AsyncFnOnce(Client) -> Result<tonic::Response<T>, Status>,
    ) -> Result<T, Error> {
        let client = WorkerServiceClient::new(self.channel(address)?).max_decoding_message_size(MAX_MESSAGE);
        let answer = match tokio::time::timeout(patience, call(client)).await {
            Err(_) => Err(Error::TimedOut),
            Ok(Err(status)) => Err(Error::Refused(status)),
            Ok(Ok(response)) => Ok(response.into_inner()),
        };
        if answer.as_ref().is_err_and(Error::breaks_the_channel) {
            self.forget(address);
        }
        answer
    }

    /// The next call to this address makes a new channel.
    pub(crate) fn forget(&self, address: &str) {
        self.channels().remove(address);
    }

    /// A channel to a worker.
    pub(crate) fn channel(&self, address: &str) -> Result<Channel, Error> {
        let now = Instant::now();
        if let Some(known) = self.channels().get_mut(address) {
            known.used = now;
            return Ok(known.channel.clone());
        }
        let channel = connect(address, self.tls.as_ref())?;
        let mut channels = self.channels();
        channels.retain(|_, known| now.duration_since(known.used) < UNUSED_FOR);
        channels.insert(address.to_owned(), Known { channel: channel.clone(), used: now });
        Ok(channel)
    }

    fn channels(&self) -> std::sync::MutexGuard<'_, HashMap<String, Known>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Error {
    /// Whether the worker does not know the run (yet).
    pub(crate) fn is_unknown_run(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == Code::NotFound)
    }

    fn breaks_the_channel(&self) -> bool {
        match self {
            Self::TimedOut | Self::Channel(_) => true,
            Self::Refused(status) => matches!(status.code(), Code::Unavailable | Code::Unknown),
            Self::Address { .. } | Self::NoTls | Self::Spec(_) => false,
        }
    }
}

fn log_failure(call: &'static str, address: &str, result: Result<(), Error>) {
    if let Err(error) = result {
        tracing::warn!(call, address, %error, "a worker could not be told; its poll will find out");
    }
}

/// What pushes a run to the life of the worker that it is recorded for.
pub(crate) fn push_request(run: &Run, incarnation: Incarnation) -> Result<wire::StartRunRequest, Error> {
    Ok(wire::StartRunRequest {
        run_id: run.id.to_string(),
        session_id: run.session.to_string(),
        tenant_id: run.tenant.to_string(),
        incarnation: incarnation.to_string(),
        lease_epoch: run.lease_epoch.map_or(0, |epoch| epoch.0),
        create_time: Some(timestamp_to_proto(run.created_at.unix_timestamp_nanos())),
        spec_json: serde_json::to_string(&run.spec)?,
        attempt: run.attempt,
    })
}

/// The least loaded first.
fn by_load(mut candidates: Vec<WorkerCandidate>) -> Vec<WorkerCandidate> {
    candidates.sort_by(|a, b| load(a).total_cmp(&load(b)));
    candidates
}

fn load(candidate: &WorkerCandidate) -> f64 {
    f64::from(candidate.busy_slots) / f64::from(candidate.slots.max(1))
}

/// A channel that connects when it is first used. Never one that is open and unauthenticated.
fn connect(address: &str, tls: Option<&InternalTls>) -> Result<Channel, Error> {
    if let Some(path) = address.strip_prefix("unix:") {
        return Ok(connect_unix(path.into()));
    }
    if !address.starts_with("https://") {
        return Err(Error::Address { address: address.to_owned() });
    }
    let tls = tls.ok_or(Error::NoTls)?;
    let endpoint = Endpoint::from_shared(address.to_owned())?.tls_config(client_tls(tls))?;
    Ok(tuned(endpoint).connect_lazy())
}

fn connect_unix(path: PathBuf) -> Channel {
    // The address only fills the request's authority; the path is where it goes.
    let endpoint = tuned(Endpoint::from_static("http://codelia-worker"));
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    }))
}

fn tuned(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(PATIENCE)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
}

pub(crate) fn client_tls(tls: &InternalTls) -> ClientTlsConfig {
    ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&tls.ca_pem))
        .identity(Identity::from_pem(&tls.cert_pem, &tls.key_pem))
        .domain_name(SERVER_NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: &str, slots: i32, busy_slots: i32) -> WorkerCandidate {
        WorkerCandidate {
            id: id.parse().unwrap(),
            incarnation: Incarnation::generate(),
            address: String::new(),
            slots,
            busy_slots,
        }
    }

    #[test]
    fn the_least_loaded_worker_is_asked_first() {
        let order = by_load(vec![candidate("full", 2, 2), candidate("half", 8, 4)]);
        assert_eq!(order[0].id.as_str(), "half");
    }

    #[tokio::test]
    async fn plain_tcp_and_tls_without_certificates_are_refused() {
        for bad in ["http://127.0.0.1:1", "127.0.0.1:1", "", "tcp:1"] {
            assert!(matches!(connect(bad, None), Err(Error::Address { .. })), "{bad}");
        }
        assert!(matches!(connect("https://127.0.0.1:1", None), Err(Error::NoTls)));
    }
}
