//! Where requests come from.

use std::net::IpAddr;

/// Where a request comes from, in its extensions. `None` for a Unix socket. The address of an IPv6
/// caller is its /64 network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source(pub Option<IpAddr>);
