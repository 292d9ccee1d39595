//! The messages between a worker and its egress proxy: one JSON text in each packet of a
//! `SOCK_SEQPACKET` Unix socket, which is the proxy's standard input.
//!
//! 1. The worker sends `configure` once. The proxy reads its files and drops its privileges.
//! 2. The worker sends `open` for each sandbox, with its sockets.
//! 3. The proxy sends `assigned`, `ask` and `connection` while the sandbox lives, and
//!    `open_connections` about all of them.
//! 4. The worker sends `close`; the proxy ends the sandbox's connections, sends their records and,
//!    last, `closed`.
//!
//! End of file ends the proxy. If the proxy ends, the worker starts another one and sends `open`
//! for each live sandbox again, followed by `decide` for its lasting decisions. The worker keeps
//! copies of the sockets for that, so connections that programs begin meanwhile wait in their
//! backlog.
//!
//! [`crate::packet`] sends and receives them.

use std::net::IpAddr;

use codelia_policy::EgressRules;
use codelia_types::RunId;
use serde::{Deserialize, Serialize};

use crate::config::Config;

/// Sockets of a sandbox that are not bound yet. Each serves one name and port.
pub const TARGET_SOCKETS: usize = codelia_policy::EGRESS_TARGETS;

/// Sockets that come with `open`, in this order: the listener of the proxy, the UDP socket and the
/// TCP listener of the resolver, and the target sockets.
pub const OPEN_SOCKETS: usize = 3 + TARGET_SOCKETS;

/// A message from the worker to the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// The settings of the proxy. The first message, and only that.
    Configure(Box<Config>),
    /// Serve a sandbox. Carries its sockets: the listener of the proxy, the UDP socket and the TCP
    /// listener of the resolver, and [`TARGET_SOCKETS`] stream sockets.
    Open(Box<Open>),
    /// Replace the rules of a sandbox. Connections that they do not allow end.
    Update {
        /// The id of the sandbox.
        sandbox: RunId,
        /// The new rules.
        rules: Box<EgressRules>,
    },
    /// The answer to `ask`. `always` and `deny` count without it, too.
    Decide {
        /// The id of the sandbox.
        sandbox: RunId,
        /// The host that was asked for.
        host: String,
        /// The port that was asked for.
        port: u16,
        /// Whether the sandbox may connect; for `once`, only the connections that wait.
        decision: Decision,
    },
    /// End a sandbox's connections and close its sockets.
    Close {
        /// The id of the sandbox.
        sandbox: RunId,
    },
}

/// A decision about a host that the rules leave to a person.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Allow the connections that wait.
    Once,
    /// Allow this host and port as long as the sandbox lives.
    Always,
    /// Refuse the connections that wait and later ones.
    Deny,
}

/// A sandbox to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The id of the sandbox.
    pub sandbox: RunId,
    /// The id of its tenant, which may have an upstream proxy of its own.
    pub tenant: String,
    /// The hosts that it may reach, and its limits.
    pub rules: EgressRules,
    /// The names that its sockets stand for already, after a restart of the proxy.
    pub assigned: Vec<Assigned>,
}

/// A socket that stands for a name and port now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assigned {
    /// The index of the socket among the target sockets.
    pub socket: usize,
    /// The name that the socket stands for.
    pub host: String,
    /// The address that stands for it in this sandbox.
    pub address: IpAddr,
    /// The port that the socket serves.
    pub port: u16,
}

/// A message from the proxy to the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// A socket was bound.
    Assigned {
        /// The id of the sandbox.
        sandbox: RunId,
        /// The socket and its name.
        #[serde(flatten)]
        assigned: Assigned,
    },
    /// Connections wait for a decision about this host and port. Sent once until it is decided.
    Ask {
        /// The id of the sandbox.
        sandbox: RunId,
        /// The host that a program wants to reach.
        host: String,
        /// The port that a program wants to reach.
        port: u16,
    },
    /// A connection ended, or an attempt or a query was refused.
    Connection(Connection),
    /// How many connections of all sandboxes are open. Sent when it has changed, once in a while.
    OpenConnections {
        /// Their number.
        count: usize,
    },
    /// The sandbox is closed and sends nothing more.
    Closed {
        /// The id of the sandbox.
        sandbox: RunId,
        /// All its traffic.
        totals: Totals,
    },
}

/// How a connection came to the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Via {
    /// `CONNECT`.
    Connect,
    /// A request in absolute form.
    Http,
    /// SOCKS5.
    Socks,
    /// The address of a name.
    Transparent,
    /// A query to the resolver.
    Dns,
}

/// One connection or refused attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The id of the sandbox.
    pub sandbox: RunId,
    /// How it came.
    pub via: Via,
    /// The host as the program named it, cleaned and at most 255 bytes.
    pub host: String,
    /// The port; 0 for a query.
    pub port: u16,
    /// The address that the proxy connected to.
    pub address: Option<IpAddr>,
    /// Why it was refused or failed, as a code such as `host_not_allowed`; `None` if it was
    /// allowed.
    pub refused: Option<String>,
    /// The pattern of the policy that decided.
    pub rule: Option<String>,
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to the sandbox.
    pub received: u64,
    /// From the first byte to the end.
    pub millis: u64,
    /// How many equal refusals this record stands for.
    pub count: u64,
}

/// All traffic of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Connections that were allowed.
    pub connections: u64,
    /// Attempts and queries that were refused.
    pub refused: u64,
    /// Bytes from the sandbox.
    pub sent: u64,
    /// Bytes to the sandbox.
    pub received: u64,
}
