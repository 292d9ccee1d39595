//! Settings of the server.

use std::{net::SocketAddr, time::Duration};

use codelia_policy::{Ceilings, EscapeOptions, Limits, Policy, Profiles};
use codelia_server::TlsFiles;
use codelia_store::{Retention, SecretKey};
use codelia_types::{Mode, NetworkMode, TenantId};

use crate::{alerts::Webhook, dispatch::Placement, web::CorsOrigins};

/// Settings of the server, chosen by the operator.
#[derive(Debug, Clone)]
pub struct Options {
    /// Address to listen on; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Certificate of the public endpoint; `None` serves without TLS.
    pub tls: Option<TlsFiles>,
    /// Certificates for workers with an `https://` address; `None` makes such workers unreachable.
    pub internal_tls: Option<TlsFiles>,
    /// Limits of runs whose caller sets none.
    pub defaults: Limits,
    /// The highest limits a caller may set, unless its tenant has ceilings of its own.
    pub ceilings: Ceilings,
    /// Timeouts of runs that depend on how they were started.
    pub timeouts: Timeouts,
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
    /// Which worker gets a new session.
    pub placement: Placement,
    /// How long open calls may take to finish after shutdown begins.
    pub shutdown_grace: Duration,
    /// Encrypts secret variables; `None` refuses them.
    pub secret_key: Option<SecretKey>,
    /// Limits of connections.
    pub connections: codelia_server::Limits,
    /// Limits of calls.
    pub calls: CallLimits,
    /// Pages of browsers that may use the API.
    pub cors_origins: CorsOrigins,
    /// Whether to log a line for each call.
    pub access_log: bool,
    /// What is done when a file call tries to leave its workspace.
    pub escape: EscapeOptions,
    /// Where alerts about attempts to escape are sent.
    pub webhook: Option<Webhook>,
    /// How long rows are kept, unless their tenant has a retention of its own.
    pub retention: Retention,
}

/// Timeouts of runs that depend on how they were started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout of a run with a terminal whose caller sets none.
    pub interactive: Duration,
    /// Timeout of a run without a terminal that was started by `StartRun` and whose caller sets none.
    pub detached: Duration,
    /// How long a run waits for a worker whose caller sets no queue timeout.
    pub queue: Duration,
    /// The highest queue timeout that a caller may set.
    pub max_queue: Duration,
    /// How long a run waits for an approval before it ends as refused.
    pub approval: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            interactive: Duration::from_secs(4 * 3600),
            detached: Duration::from_secs(4 * 3600),
            queue: Duration::from_secs(600),
            max_queue: Duration::from_secs(24 * 3600),
            approval: Duration::from_secs(600),
        }
    }
}

/// What callers may do at the same time on one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallLimits {
    /// Calls, watches included.
    pub max_calls_per_key: usize,
    /// Watches of runs.
    pub max_watches_per_key: usize,
    /// Bytes of requests: of all unary calls, and of the unfinished messages of streams.
    pub max_request_bytes_per_key: usize,
    /// How long a caller may take to send a message.
    pub message_timeout: Duration,
    /// Reads of up to 100 rows for the lists of one tenant.
    pub list_reads_per_second: u32,
    /// Wrong keys of one address; 0 turns the limit off.
    pub failed_keys_per_minute: u32,
}

/// Limits of a small server, for tests. The configuration has its own defaults.
impl Default for CallLimits {
    fn default() -> Self {
        Self {
            max_calls_per_key: 100,
            max_watches_per_key: 100,
            max_request_bytes_per_key: 16 * 1024 * 1024,
            message_timeout: Duration::from_secs(10),
            list_reads_per_second: 100,
            failed_keys_per_minute: 100,
        }
    }
}
