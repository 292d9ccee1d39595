//! What an operator chooses about the server.

use std::{fmt, net::SocketAddr, time::Duration};

use codelia_policy::{Ceilings, Limits, Policy};
use codelia_types::{Mode, NetworkMode};

/// What an operator chooses about the server.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where it listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Certificate of the public endpoint; `None` serves without TLS.
    pub tls: Option<ServerTls>,
    /// How workers with an `https://` address are reached; without it they are not.
    pub internal_tls: Option<InternalTls>,
    /// Limits of runs whose caller asked for none.
    pub defaults: Limits,
    /// The most a caller may ask for.
    pub ceilings: Ceilings,
    /// What any command may do; the policies of sessions and runs only tighten it.
    pub policy: Policy,
    /// Mode of sessions whose caller asked for none.
    pub default_mode: Mode,
    /// Network of runs whose caller asked for none; mode `logical` promises none.
    pub default_network: Option<NetworkMode>,
    /// Time to live of sessions whose caller asked for none.
    pub session_ttl: Duration,
    /// The longest time to live a caller may ask for.
    pub max_session_ttl: Duration,
    /// Whether mode `logical`, which isolates nothing, may be used.
    pub allow_logical: bool,
    /// How long calls may take to finish once the server is told to stop.
    pub shutdown_grace: Duration,
}

/// Certificate and key of the public endpoint.
#[derive(Clone)]
pub struct ServerTls {
    /// Certificate chain, PEM.
    pub cert_pem: Vec<u8>,
    /// Private key, PEM.
    pub key_pem: Vec<u8>,
}

/// Both sides of the channel to workers prove who they are with these.
#[derive(Clone)]
pub struct InternalTls {
    /// Who signs workers and apis, PEM.
    pub ca_pem: Vec<u8>,
    /// This side's certificate, PEM.
    pub cert_pem: Vec<u8>,
    /// Its private key, PEM.
    pub key_pem: Vec<u8>,
}

// Keys must not reach a log.
impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls").finish_non_exhaustive()
    }
}

impl fmt::Debug for InternalTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InternalTls").finish_non_exhaustive()
    }
}
