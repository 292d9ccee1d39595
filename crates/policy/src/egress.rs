//! What a sandbox in network mode `proxy` may reach.

use std::time::Duration;

use serde::{Deserialize, Serialize};

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
    /// Its limits.
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
            queries_per_second: 50,
            sent_bytes: None,
            received_bytes: None,
            idle_timeout: Duration::from_secs(300),
        }
    }
}

/// What the rules say about a host and port.
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
    /// Decides about a host, which is a lower-case name without a final dot, or an IP address.
    #[must_use]
    pub fn decide(&self, host: &str, port: u16) -> EgressDecision<'_> {
        let find = |patterns: &'_ [String]| patterns.iter().position(|pattern| matches(pattern, host));
        if let Some(at) = find(&self.blocked_hosts) {
            return EgressDecision::Blocked(&self.blocked_hosts[at]);
        }
        let (allowed, ask) = (find(&self.allowed_hosts), find(&self.ask_hosts));
        if allowed.is_none() && ask.is_none() {
            return EgressDecision::HostNotAllowed;
        }
        if !self.allowed_ports.contains(&port) {
            return EgressDecision::PortNotAllowed;
        }
        match (allowed, ask) {
            (Some(at), _) => EgressDecision::Allow(&self.allowed_hosts[at]),
            (None, Some(at)) => EgressDecision::Ask(&self.ask_hosts[at]),
            (None, None) => EgressDecision::HostNotAllowed,
        }
    }
}

/// Whether a pattern matches a host. A leading `*.` stands for one or more labels.
fn matches(pattern: &str, host: &str) -> bool {
    match pattern.strip_prefix('*') {
        Some(suffix) => host.len() > suffix.len() && host.ends_with(suffix),
        None => pattern == host,
    }
}
