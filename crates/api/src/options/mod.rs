//! Settings of the server.

mod limits;

use std::{
    net::SocketAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use codelia_policy::{EscapeOptions, Policy, Profiles};
use codelia_server::{TlsFiles, within_share};
use codelia_store::{Retention, SecretKey};
use codelia_types::{
    ByteSize, Mode, NetworkMode, TenantId, duration,
    option::{InvalidOption, positive, text},
};

pub use self::limits::{ApprovalOptions, LimitOptions, RunLimits, Timeouts};
use crate::{server::web::CorsOrigins, upkeep::alerts::Webhook, workers::Placement};

/// The part of the open files that connections may use: the rest is for workers and the database.
const CONNECTION_SHARE: u64 = 2;

/// What the server is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the operator chose for the API.
    pub api: ApiOptions,
    /// Certificate of the public endpoint; `None` serves without TLS.
    pub tls: Option<TlsFiles>,
    /// Certificates for workers with an `https://` address; `None` makes such workers unreachable.
    pub internal_tls: Option<TlsFiles>,
    /// The limits of runs.
    pub limits: RunLimits,
    /// The policy of the installation; policies of sessions and runs can only tighten it.
    pub policy: Policy,
    /// The profiles that sessions can name.
    pub profiles: Profiles,
    /// Mode of sessions whose caller sets none.
    pub default_mode: Mode,
    /// Network of runs whose caller sets none; not applied in mode `logical`.
    pub default_network: Option<NetworkMode>,
    /// Time to live of sessions whose caller sets none.
    pub session_ttl: Duration,
    /// The longest time to live a caller may set.
    pub max_session_ttl: Duration,
    /// Whether mode `logical`, which isolates nothing, is allowed.
    pub allow_logical: bool,
    /// A tenant that may use mode `logical` whatever its isolation floor, until this server stops.
    pub unisolated_tenant: Option<TenantId>,
    /// How long open calls may take to finish after shutdown begins.
    pub shutdown_grace: Duration,
    /// Encrypts secret variables; `None` refuses them.
    pub secret_key: Option<SecretKey>,
    /// How many files the process may open.
    pub open_files: u64,
    /// Whether to log a line for each call.
    pub access_log: bool,
    /// What is done when a file call tries to leave its workspace.
    pub escape: EscapeOptions,
    /// Where alerts about attempts to escape are sent.
    pub webhook: Option<Webhook>,
    /// How long rows are kept, unless their tenant has a retention of its own.
    pub retention: Retention,
}

codelia_types::options! {
    /// The public API: the section `api` of the configuration.
    pub struct ApiOptions {
        /// Address to listen on; port 0 picks a free port.
        pub listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 7300)),
        /// Certificate chain of the public API, PEM. Default: no TLS.
        pub tls_cert: Option<PathBuf> = None,
        /// Key of the certificate, PEM. Default: no TLS.
        pub tls_key: Option<PathBuf> = None,
        /// Profile `prod` may serve other machines without TLS: a proxy or mesh in front does it.
        pub allow_plaintext: bool = false,
        /// Connections; at most half of the open files of the process.
        pub max_connections: NonZeroUsize = const { NonZeroUsize::new(2048).unwrap() },
        /// Connections from one address (IPv6: one /64). Default: half of all connections.
        pub max_connections_per_address: Option<NonZeroUsize> = None,
        /// Calls of a connection at the same time; a client waits with further ones.
        pub max_streams_per_connection: NonZeroU32 = const { NonZeroU32::new(1024).unwrap() },
        /// Unread bytes of one call.
        #[serde(deserialize_with = "positive")]
        pub stream_window: ByteSize = ByteSize::kib(256),
        /// Unread bytes of all calls of a connection.
        #[serde(deserialize_with = "positive")]
        pub connection_window: ByteSize = ByteSize::mib(16),
        /// From the connection to its first request, TLS included.
        #[serde(with = "duration")]
        pub first_request_timeout: Duration = Duration::from_secs(10),
        /// How long a connection may have no open call.
        #[serde(with = "duration")]
        pub idle_timeout: Duration = Duration::from_secs(300),
        /// Between two pings.
        #[serde(with = "duration")]
        pub keepalive_interval: Duration = Duration::from_secs(30),
        /// How long the answer to a ping may take.
        #[serde(with = "duration")]
        pub keepalive_timeout: Duration = Duration::from_secs(10),
        /// How long a request may take to arrive.
        #[serde(with = "duration")]
        pub message_timeout: Duration = Duration::from_secs(60),
        /// Open calls of one key.
        pub max_calls_per_key: NonZeroUsize = const { NonZeroUsize::new(1024).unwrap() },
        /// Open `WatchRun` calls of one key.
        pub max_watches_per_key: NonZeroUsize = const { NonZeroUsize::new(256).unwrap() },
        /// Size of the requests of one key that are being received or handled.
        #[serde(deserialize_with = "positive")]
        pub max_request_size_per_key: ByteSize = ByteSize::mib(128),
        /// Reads of up to 100 runs or sessions for the lists of one tenant; further ones wait, at
        /// most 10 s.
        pub list_reads_per_second: NonZeroU32 = const { NonZeroU32::new(50).unwrap() },
        /// Wrong keys from one address; 0 turns the limit off.
        pub failed_keys_per_minute: u32 = 120,
        /// Origins of pages that may use the API from a browser, with commas between them, or `*`
        /// ([web](web.md#browsers)).
        #[serde(with = "text")]
        pub cors_origins: CorsOrigins = CorsOrigins::None,
        /// Which of two random workers gets a new session: `spread` the less loaded one,
        /// `lowest_number` the one whose id ends in the lower number while less than half of its
        /// slots are busy ([scale](kubernetes.md#scale)).
        pub placement: Placement = Placement::Spread,
    }
}

impl ApiOptions {
    /// The certificate of the public API; `None` if TLS is off, which other machines may only see
    /// if the configuration says so, or in a profile other than `prod`.
    ///
    /// # Errors
    /// If only half of the certificate is set, or other machines may not be served without one.
    pub fn tls(&self, is_prod: bool) -> Result<Option<TlsFiles>, InvalidOption> {
        match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => {
                return Ok(Some(TlsFiles { cert: cert.clone(), key: key.clone(), ca: None }));
            }
            (None, None) => {}
            _ => {
                return Err(InvalidOption::new(
                    "api.tls_cert and api.tls_key",
                    "set both, or neither",
                ));
            }
        }
        let listen = self.listen;
        if listen.ip().is_loopback() || self.allow_plaintext {
            return Ok(None);
        }
        if is_prod {
            return Err(InvalidOption::new(
                "api.listen",
                format!(
                    "{listen} is not a loopback address, and profile prod does not send keys without TLS: \
                     set api.tls_cert and api.tls_key (`codelia certs dev` creates some), or \
                     api.allow_plaintext = true if a proxy or mesh in front of it does TLS"
                ),
            ));
        }
        tracing::warn!(
            %listen,
            "API served without TLS to other machines: keys and output can be read on the way; set \
             api.tls_cert and api.tls_key (`codelia certs dev` creates some)"
        );
        Ok(None)
    }

    /// Limits of connections, within the open files of this process.
    #[must_use]
    pub fn connections(&self, open_files: u64) -> codelia_server::Limits {
        let share = open_files / CONNECTION_SHARE;
        let max_connections = within_share("api.max_connections", self.max_connections, share);
        let half = max_connections.div_ceil(2);
        codelia_server::Limits {
            max_connections,
            max_connections_per_address: self.max_connections_per_address.map_or(half, Into::into),
            first_request_timeout: self.first_request_timeout,
            idle_timeout: self.idle_timeout,
            keepalive_interval: self.keepalive_interval,
            keepalive_timeout: self.keepalive_timeout,
            max_streams_per_connection: self.max_streams_per_connection.get(),
            stream_window: self.stream_window,
            connection_window: self.connection_window,
        }
    }
}
