//! The settings of the egress proxy, which the worker sends in its first message.
//!
//! They hold no secrets: those are in a file that the proxy alone reads, before it drops its
//! privileges.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use codelia_types::{
    TenantId, duration,
    option::{comma_list, comma_map, optional_text},
};
use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};

const DNS_PORT: u16 = 53;
/// Directory of the certificate authority in the data directory.
const CA_DIR: &str = "egress-ca";

codelia_types::options! {
    /// The egress proxy of runs with network mode `proxy`: the section `egress` of the
    /// configuration.
    #[derive(PartialEq, Eq)]
    pub struct Options {
        /// DNS servers that resolve allowed names, with commas between them; empty for those of
        /// `/etc/resolv.conf`.
        #[serde(serialize_with = "comma_list::serialize", deserialize_with = "resolvers")]
        pub resolvers: Vec<SocketAddr> = Vec::new(),
        /// Networks that allowed names may lead to although they are private: `ADDRESS/BITS` with
        /// commas between them.
        #[serde(with = "comma_list")]
        pub private_addresses: Vec<IpNet> = Vec::new(),
        /// Proxy that connections leave through, after all checks: `socks5://IP:PORT` or
        /// `http://IP:PORT`. Default: connections are direct.
        #[serde(with = "optional_text")]
        pub upstream: Option<Upstream> = None,
        /// Proxies of tenants that have one of their own: `TENANT=URL` with commas between them.
        #[serde(with = "comma_map")]
        pub tenant_upstreams: BTreeMap<TenantId, Upstream> = BTreeMap::new(),
        /// TOML file with the secrets of hosts and of the upstream proxies. Default: no
        /// credentials.
        pub credentials_file: Option<PathBuf> = None,
        /// Directory with the certificate authority for hosts with credentials. Default:
        /// `DATA_DIR/egress-ca`, if there are credentials.
        pub ca_dir: Option<PathBuf> = None,
        /// PEM file with authorities that the proxy trusts in addition. Default: the system's
        /// certificates only.
        pub extra_roots_file: Option<PathBuf> = None,
        /// A connection that waits for a decision is refused after this time.
        #[serde(with = "duration")]
        pub ask_timeout: Duration = Duration::from_secs(120),
        /// For resolving a name and connecting to it.
        #[serde(with = "duration")]
        pub connect_timeout: Duration = Duration::from_secs(15),
        /// For the head of a request, and for the start of a TLS or SOCKS handshake.
        #[serde(with = "duration")]
        pub header_timeout: Duration = Duration::from_secs(10),
    }
}

impl Options {
    /// Completes the paths: the proxy may work in another directory.
    ///
    /// # Errors
    /// If this process has no working directory.
    pub fn in_data_dir(mut self, data_dir: &Path) -> io::Result<Self> {
        if self.credentials_file.is_some() {
            self.ca_dir.get_or_insert_with(|| data_dir.join(CA_DIR));
        }
        for path in [&mut self.credentials_file, &mut self.ca_dir, &mut self.extra_roots_file] {
            *path = path.as_deref().map(std::path::absolute).transpose()?;
        }
        Ok(self)
    }

    /// The files of the certificate authority.
    #[must_use]
    pub fn authority(&self) -> Option<Authority> {
        self.ca_dir.as_deref().map(Authority::in_directory)
    }
}

/// Reads addresses with or without a port.
fn resolvers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SocketAddr>, D::Error> {
    struct Resolver(SocketAddr);

    impl FromStr for Resolver {
        type Err = String;

        fn from_str(text: &str) -> Result<Self, String> {
            let address = text.parse::<IpAddr>().map(|address| SocketAddr::new(address, DNS_PORT));
            let address = address.or_else(|_| text.parse());
            let invalid = |_| format!("{text:?} is not an IP address, with or without a port");
            address.map(Self).map_err(invalid)
        }
    }

    Ok(comma_list::deserialize(from)?.into_iter().map(|Resolver(address)| address).collect())
}

/// The settings of one proxy process. Fields that are missing have their default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The user and group that the proxy changes to. Required if root starts it, unused otherwise.
    pub user: Option<User>,
    /// Addresses of the installation that no sandbox may reach, in addition to those of this host's
    /// interfaces. They win over `private_addresses`.
    pub own_addresses: Vec<IpAddr>,
    /// The section `egress` of the configuration.
    pub options: Options,
}

impl From<Options> for Config {
    fn from(options: Options) -> Self {
        Self { options, ..Self::default() }
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upstream {
    /// The protocol that it speaks.
    pub protocol: UpstreamProtocol,
    /// The address that it listens on.
    pub address: SocketAddr,
}

/// The protocol of an upstream proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// SOCKS5, with a password if there is one.
    Socks5,
    /// HTTP `CONNECT`, with basic credentials if there are some.
    Connect,
}

/// Text that is not an upstream proxy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidUpstream {
    /// The text has a password, which is not repeated.
    #[error("put the user and password into egress.credentials_file")]
    Password,
    /// The text is something else.
    #[error("{0:?} is neither socks5://IP:PORT nor http://IP:PORT")]
    Malformed(String),
}

impl FromStr for Upstream {
    type Err = InvalidUpstream;

    fn from_str(text: &str) -> Result<Self, InvalidUpstream> {
        let (protocol, address) = text.split_once("://").unwrap_or_default();
        let address = address.trim_end_matches('/');
        if address.contains('@') {
            return Err(InvalidUpstream::Password);
        }
        match (protocol, address.parse()) {
            ("socks5", Ok(address)) => Ok(Self { protocol: UpstreamProtocol::Socks5, address }),
            ("http", Ok(address)) => Ok(Self { protocol: UpstreamProtocol::Connect, address }),
            _ => Err(InvalidUpstream::Malformed(text.to_owned())),
        }
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol {
            UpstreamProtocol::Socks5 => write!(f, "socks5://{}", self.address),
            UpstreamProtocol::Connect => write!(f, "http://{}", self.address),
        }
    }
}

/// The files of the installation's certificate authority, in PEM form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authority {
    /// The certificate, which sandboxes trust.
    pub certificate_file: PathBuf,
    /// The private key, which only the proxy reads.
    pub key_file: PathBuf,
}

impl Authority {
    /// The files of an authority in this directory.
    #[must_use]
    pub fn in_directory(directory: &Path) -> Self {
        Self { certificate_file: directory.join("ca.crt"), key_file: directory.join("ca.key") }
    }
}
