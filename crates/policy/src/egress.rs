//! The hosts that a sandbox in network mode `proxy` may reach.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{NetworkPolicy, hosts};

/// Where the egress proxy listens inside a sandbox.
pub const EGRESS_PROXY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3128);

/// Where the resolver of the egress proxy listens inside a sandbox.
pub const EGRESS_RESOLVER: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 53)), 53);

/// The networks, by address and prefix length, whose addresses stand for names inside a sandbox.
/// They are reserved for tests of network devices, so no host is there.
pub const EGRESS_NETWORKS: [(IpAddr, u8); 2] = [
    (IpAddr::V4(Ipv4Addr::new(198, 18, 0, 0)), 15),
    (IpAddr::V6(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0)), 64),
];

/// Sockets of a sandbox that are not bound yet. Each serves one name and port.
pub const EGRESS_TARGETS: usize = 240;

/// The variables with which programs find the proxy. Programs differ in which case they read. Not
/// SOCKS: HTTP clients without support for it fail then (Python's httpx, and the SDKs on it), and
/// programs without a proxy reach the same by its resolver.
const VARIABLES: [(&str, &str); 4] = [
    ("HTTP_PROXY", "http://127.0.0.1:3128"),
    ("HTTPS_PROXY", "http://127.0.0.1:3128"),
    ("ALL_PROXY", "http://127.0.0.1:3128"),
    ("NO_PROXY", "localhost,127.0.0.1,::1"),
];

/// The variables with which programs find a file of certificate authorities other than the
/// system's.
pub const CA_VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "CARGO_HTTP_CAINFO",
    "GIT_SSL_CAINFO",
];

/// The files of `/etc` with which programs find the resolver.
pub(crate) const RESOLVER_FILES: [(&str, &str); 2] = [
    ("/etc/resolv.conf", "nameserver 127.0.0.53\noptions edns0 ndots:0\n"),
    (
        "/etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\n\
         services: files\n",
    ),
];

/// The variables of a command in network mode `proxy`, in both cases.
pub(crate) fn variables() -> impl Iterator<Item = (String, String)> {
    VARIABLES.into_iter().flat_map(|(name, value)| {
        [name.to_owned(), name.to_ascii_lowercase()].map(|name| (name, value.to_owned()))
    })
}

/// Queries to the resolver for each new connection that a sandbox may make. A program asks for the
/// addresses of both families before it connects, and some ask again under a search domain.
const QUERIES_PER_CONNECTION: u32 = 4;

/// The ports that a policy without `network.allowed_ports` allows.
pub const DEFAULT_EGRESS_PORTS: [u16; 2] = [80, 443];

/// The egress rules of one sandbox, made from its effective policy. Named sets are expanded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressRules {
    /// Patterns of the hosts that it may reach.
    pub allowed_hosts: Vec<String>,
    /// Patterns of the hosts that need a person's decision.
    pub ask_hosts: Vec<String>,
    /// Patterns of the hosts that it may never reach. They win over the others.
    pub blocked_hosts: Vec<String>,
    /// The ports that it may reach.
    pub allowed_ports: Vec<u16>,
    /// Names of the installation's credentials that its requests get, by host.
    pub credentials: Vec<String>,
    /// The limits of its connections.
    pub limits: EgressLimits,
}

/// The limits of a sandbox's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressLimits {
    /// Concurrent connections.
    pub connections: u32,
    /// New connections in each second.
    pub connections_per_second: u32,
    /// Queries to the resolver in each second.
    pub queries_per_second: u32,
    /// Bytes from the sandbox; `None` for any number.
    pub sent_bytes: Option<u64>,
    /// Bytes to the sandbox; `None` for any number.
    pub received_bytes: Option<u64>,
    /// A connection without traffic ends after this time.
    pub idle_timeout: Duration,
}

impl Default for EgressLimits {
    fn default() -> Self {
        Self {
            connections: 128,
            connections_per_second: 64,
            queries_per_second: 64 * QUERIES_PER_CONNECTION,
            sent_bytes: None,
            received_bytes: None,
            idle_timeout: Duration::from_secs(300),
        }
    }
}

/// The decision of the rules about a host and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EgressDecision<'a> {
    /// Allowed by this pattern.
    Allow(&'a str),
    /// This pattern leaves it to a person.
    Ask(&'a str),
    /// This pattern blocks it.
    Blocked(&'a str),
    /// No pattern allows the host.
    HostNotAllowed,
    /// The port is not allowed.
    PortNotAllowed,
}

impl EgressRules {
    /// The rules of a sandbox with this effective policy. What the policy leaves open has its
    /// default: no hosts, the ports [`DEFAULT_EGRESS_PORTS`], no credentials,
    /// [`EgressLimits::default`].
    #[must_use]
    pub fn from_policy(policy: &NetworkPolicy) -> Self {
        let hosts = |list: &Option<Vec<String>>| hosts::expand(list.as_deref().unwrap_or_default());
        let default = EgressLimits::default();
        let connections_per_second =
            policy.max_connections_per_second.unwrap_or(default.connections_per_second);
        Self {
            allowed_hosts: hosts(&policy.allowed_hosts),
            ask_hosts: hosts(&policy.ask_hosts),
            blocked_hosts: hosts::expand(&policy.blocked_hosts),
            allowed_ports: policy
                .allowed_ports
                .clone()
                .unwrap_or_else(|| DEFAULT_EGRESS_PORTS.to_vec()),
            credentials: policy.credentials.clone().unwrap_or_default(),
            limits: EgressLimits {
                connections: policy.max_connections.unwrap_or(default.connections),
                connections_per_second,
                // With fewer, connections would wait for queries.
                queries_per_second: connections_per_second
                    .saturating_mul(QUERIES_PER_CONNECTION)
                    .max(default.queries_per_second),
                sent_bytes: policy.max_sent_bytes,
                received_bytes: policy.max_received_bytes,
                idle_timeout: policy.idle_timeout.unwrap_or(default.idle_timeout),
            },
        }
    }

    /// Decides about a host, which is a lower-case name without a final dot, or an IP address in
    /// its shortest form. A name that programs may read as an address matches no wildcard.
    #[must_use]
    pub fn decide(&self, host: &str, port: u16) -> EgressDecision<'_> {
        if let Some(pattern) = hosts::find(&self.blocked_hosts, host) {
            return EgressDecision::Blocked(pattern);
        }
        let allowed = hosts::find(&self.allowed_hosts, host);
        let ask = hosts::find(&self.ask_hosts, host);
        match allowed.map(EgressDecision::Allow).or(ask.map(EgressDecision::Ask)) {
            None => EgressDecision::HostNotAllowed,
            Some(_) if !self.allowed_ports.contains(&port) => EgressDecision::PortNotAllowed,
            Some(decision) => decision,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Format, Policy};

    fn rules(yaml: &str) -> EgressRules {
        let policy = Policy::parse(yaml, Format::Yaml).unwrap();
        EgressRules::from_policy(&policy.network)
    }

    #[test]
    fn blocked_wins_over_allowed_and_allowed_over_ask() {
        let rules = rules(
            "network: {mode: proxy, allowed_hosts: ['*.example.com', 'set:pypi'], ask_hosts: ['*'], \
             blocked_hosts: [bad.example.com]}",
        );
        for (host, port, expected) in [
            ("a.example.com", 443, EgressDecision::Allow("*.example.com")),
            ("bad.example.com", 443, EgressDecision::Blocked("bad.example.com")),
            ("pypi.org", 80, EgressDecision::Allow("pypi.org")),
            ("pypi.org", 22, EgressDecision::PortNotAllowed),
            ("other.org", 443, EgressDecision::Ask("*")),
            ("192.0.2.1", 443, EgressDecision::HostNotAllowed),
        ] {
            assert_eq!(rules.decide(host, port), expected, "{host}:{port}");
        }
    }

    #[test]
    fn queries_never_hold_up_allowed_connections() {
        for policy in ["", "network: {mode: proxy, max_connections_per_second: 1000}"] {
            let limits = rules(policy).limits;
            assert!(limits.queries_per_second >= 2 * limits.connections_per_second, "{limits:?}");
        }
    }

    #[test]
    fn empty_policy_allows_no_host() {
        let rules = rules("");
        assert_eq!(rules.decide("example.com", 443), EgressDecision::HostNotAllowed);
        assert_eq!(rules.allowed_ports, DEFAULT_EGRESS_PORTS);
        assert_eq!(rules.limits, EgressLimits::default());
        assert!(rules.credentials.is_empty());
    }
}
