//! The settings of the egress proxy, which the worker sends in its first message.
//!
//! It holds no secrets: those are in a file that the proxy alone reads, before it drops its
//! privileges.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The settings of one proxy process. Fields that are missing have their default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The user and group that the proxy changes to. Required if root starts it, unused otherwise.
    pub user: Option<User>,
    /// DNS servers that resolve allowed names. Empty for those of `/etc/resolv.conf`.
    pub resolvers: Vec<SocketAddr>,
    /// Networks that allowed names may lead to although they are private or otherwise special.
    pub private_addresses: Vec<IpNet>,
    /// Addresses of the installation that no sandbox may reach, in addition to those of this host's
    /// interfaces. They win over `private_addresses`.
    pub own_addresses: Vec<IpAddr>,
    /// A proxy that connections leave through, after all checks.
    pub upstream: Option<Upstream>,
    /// The same for the sandboxes of a tenant, by its id. They win over `upstream`.
    pub tenant_upstreams: BTreeMap<String, Upstream>,
    /// A TOML file with the secrets of hosts and of the upstream proxies.
    pub credentials_file: Option<PathBuf>,
    /// The certificate authority for hosts with credentials. Required with such hosts.
    pub authority: Option<Authority>,
    /// A PEM file with authorities that the proxy trusts in addition to the system's.
    pub extra_roots_file: Option<PathBuf>,
    /// A connection that waits for a decision is refused after this time.
    pub ask_timeout: Duration,
    /// For resolving a name and connecting to it.
    pub connect_timeout: Duration,
    /// For a request's head, a SOCKS greeting or the start of a TLS handshake.
    pub header_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            user: None,
            resolvers: Vec::new(),
            private_addresses: Vec::new(),
            own_addresses: Vec::new(),
            upstream: None,
            tenant_upstreams: BTreeMap::new(),
            credentials_file: None,
            authority: None,
            extra_roots_file: None,
            ask_timeout: Duration::from_secs(120),
            connect_timeout: Duration::from_secs(15),
            header_timeout: Duration::from_secs(10),
        }
    }
}

/// An unprivileged user and group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    /// The user id; not 0.
    pub uid: u32,
    /// The group id; not 0.
    pub gid: u32,
}

/// A proxy between this host and the destinations. The credentials file has its password.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upstream {
    /// Its protocol.
    pub protocol: UpstreamProtocol,
    /// Its address.
    pub address: SocketAddr,
}

/// The protocol of an upstream proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpstreamProtocol {
    /// SOCKS5, with a password if there is one.
    Socks5,
    /// HTTP `CONNECT`, with basic credentials if there are some.
    Connect,
}

/// The files of the installation's certificate authority, in PEM form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// Its certificate, which sandboxes trust.
    pub certificate_file: PathBuf,
    /// Its private key, which only the proxy reads.
    pub key_file: PathBuf,
}
