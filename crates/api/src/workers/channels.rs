//! Channels to workers, one for each address.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use codelia_server::{TlsIdentity, TlsPem};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    service::Routes,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};

use super::{error::Error, transport::WorkerTransport};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// A channel that was not used for this long probably belongs to a worker that is gone.
const MAX_IDLE: Duration = Duration::from_secs(600);
/// The name in the certificate of every worker.
const SERVER_NAME: &str = "codelia-worker";
/// A stalled stream holds back at most this much of the connection that it shares with others …
const STREAM_WINDOW: u32 = 256 * 1024;
/// … which has room for thousands of stalled streams.
const CONNECTION_WINDOW: u32 = 1024 * 1024 * 1024;

#[derive(Debug)]
struct CachedChannel {
    channel: Channel,
    /// The certificates that it connects with.
    pem: Option<Arc<TlsPem>>,
    used_at: Instant,
}

/// Channels to workers by address.
#[derive(Debug)]
pub(crate) struct Channels {
    tls: Option<Arc<TlsIdentity>>,
    channels: Mutex<HashMap<String, CachedChannel>>,
    /// The worker that runs in this process, with its address.
    local: OnceLock<(String, Routes)>,
}

impl Channels {
    pub(crate) fn new(tls: Option<Arc<TlsIdentity>>) -> Self {
        Self { tls, channels: Mutex::default(), local: OnceLock::new() }
    }

    /// Calls to this address go to these services from now on, without a connection.
    pub(crate) fn add_local(&self, address: &str, services: Routes) {
        self.local.get_or_init(|| (address.to_owned(), services));
    }

    /// The way to the worker with an address.
    pub(crate) fn get(&self, address: &str) -> Result<WorkerTransport, Error> {
        match self.local.get() {
            Some((local, services)) if local == address => {
                Ok(WorkerTransport::Local(services.clone()))
            }
            _ => self.channel(address).map(WorkerTransport::Remote),
        }
    }

    /// Returns the channel to an address, or a new one. After certificates were replaced, calls
    /// that have begun keep the old channel, and new calls get a new one.
    fn channel(&self, address: &str) -> Result<Channel, Error> {
        let now = Instant::now();
        let pem = self.tls.as_ref().map(|tls| tls.pem());
        if let Some(cached) =
            self.lock().get_mut(address).filter(|cached| is_same(&cached.pem, &pem))
        {
            cached.used_at = now;
            return Ok(cached.channel.clone());
        }
        let channel = connect(address, pem.as_deref())?;
        let mut channels = self.lock();
        channels.retain(|_, cached| now.duration_since(cached.used_at) < MAX_IDLE);
        channels.insert(
            address.to_owned(),
            CachedChannel { channel: channel.clone(), pem, used_at: now },
        );
        Ok(channel)
    }

    /// Makes the next call to this address open a new channel.
    pub(crate) fn remove(&self, address: &str) {
        self.lock().remove(address);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, CachedChannel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_same(one: &Option<Arc<TlsPem>>, other: &Option<Arc<TlsPem>>) -> bool {
    one.as_ref().map(Arc::as_ptr) == other.as_ref().map(Arc::as_ptr)
}

/// A channel that connects on first use: over a Unix socket or mutual TLS, never plain TCP.
fn connect(address: &str, tls: Option<&TlsPem>) -> Result<Channel, Error> {
    if let Some(path) = address.strip_prefix("unix:") {
        return Ok(connect_unix(path.into()));
    }
    if !address.starts_with("https://") {
        return Err(Error::Address { address: address.to_owned() });
    }
    let tls = tls.ok_or_else(|| Error::TlsNotConfigured { address: address.to_owned() })?;
    let endpoint = Endpoint::from_shared(address.to_owned())?.tls_config(client_tls(tls))?;
    Ok(configure(endpoint).connect_lazy())
}

fn connect_unix(path: PathBuf) -> Channel {
    // The URL only fills the request's authority; the connector uses the path.
    let endpoint = configure(Endpoint::from_static("http://codelia-worker"));
    endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    }))
}

fn configure(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
}

/// The TLS settings for connections to workers.
fn client_tls(tls: &TlsPem) -> ClientTlsConfig {
    ClientTlsConfig::new()
        .ca_certificates(tls.ca.iter().map(Certificate::from_pem))
        .identity(Identity::from_pem(&tls.cert, &tls.key))
        .domain_name(SERVER_NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn plain_tcp_and_unconfigured_tls_are_rejected() {
        for bad in ["http://127.0.0.1:1", "127.0.0.1:1", "", "tcp:1"] {
            assert!(matches!(connect(bad, None), Err(Error::Address { .. })), "{bad}");
        }
        let error = connect("https://127.0.0.1:1", None);
        assert!(matches!(error, Err(Error::TlsNotConfigured { .. })));
    }
}
