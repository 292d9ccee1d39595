//! Limits of a listener's connections.

use std::{num::NonZeroUsize, time::Duration};

use codelia_types::ByteSize;

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
    pub stream_window: ByteSize,
    /// Bytes that all calls of a connection may send before the server reads them.
    pub connection_window: ByteSize,
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
            stream_window: ByteSize::kib(256),
            connection_window: ByteSize::mib(1),
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
            .initial_stream_window_size(window(self.stream_window))
            .initial_connection_window_size(window(self.connection_window))
    }
}

/// HTTP/2 allows windows of up to 2 GiB.
fn window(size: ByteSize) -> u32 {
    let max = i32::MAX.unsigned_abs();
    u32::try_from(size.bytes()).unwrap_or(max).min(max)
}

/// The configured number of connections, or `share`, the part of the open files that they may use,
/// if that is less.
#[must_use]
pub fn within_share(key: &'static str, configured: NonZeroUsize, share: u64) -> usize {
    let max = usize::try_from(share).unwrap_or(usize::MAX);
    if configured.get() > max {
        tracing::warn!(key, configured, lowered_to = max, "too few descriptors (raise ulimit -n)");
    }
    configured.get().min(max)
}
