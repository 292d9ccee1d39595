//! Accepts connections under caps and timeouts, and serves gRPC on them.
//!
//! Every connection has a task that knows its open calls. A connection that sends no request in
//! time, or has no open call for long, is closed: first politely, then by failing its next read. A
//! call that is open and quiet keeps its connection.

#![forbid(unsafe_code)]

mod accept;
mod admission;
mod calls;
mod connection;
mod tls;
mod transport;

use std::{net::IpAddr, time::Duration};

pub use self::{
    accept::{Listener, serve},
    calls::hold_until_end,
    tls::{TlsError, TlsFiles, TlsIdentity, TlsPem},
    transport::Transport,
};

/// Limits of the connections of one listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Connections in total; further ones are closed at once.
    pub max_connections: usize,
    /// Connections from one address; for IPv6 from one /64 network.
    pub max_connections_per_address: usize,
    /// From the connection to its first request, the TLS handshake included.
    pub first_request_timeout: Duration,
    /// How long a connection may have no open call.
    pub idle_timeout: Duration,
    /// How often the server pings the client.
    pub keepalive_interval: Duration,
    /// How long the client may take to answer a ping.
    pub keepalive_timeout: Duration,
    /// Concurrent calls on one connection.
    pub max_streams_per_connection: u32,
    /// Bytes that one call may send before the server reads them.
    pub stream_window: u32,
    /// Bytes that all calls of a connection may send before the server reads them.
    pub connection_window: u32,
}

/// Limits of a small server, for tests. The configuration has its own defaults.
impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 100,
            max_connections_per_address: 100,
            first_request_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            keepalive_interval: Duration::from_secs(5),
            keepalive_timeout: Duration::from_secs(10),
            max_streams_per_connection: 100,
            stream_window: 256 * 1024,
            connection_window: 1024 * 1024,
        }
    }
}

impl Limits {
    /// A server with these limits.
    #[must_use]
    pub fn server(&self) -> tonic::transport::Server {
        tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(self.keepalive_interval))
            .http2_keepalive_timeout(Some(self.keepalive_timeout))
            .max_concurrent_streams(self.max_streams_per_connection)
            .initial_stream_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
    }
}

/// Where a request comes from, in its extensions. `None` for a Unix socket. The address of an IPv6
/// caller is its /64 network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source(pub Option<IpAddr>);
