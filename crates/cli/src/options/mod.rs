//! Puts together what each service is started with.

mod api;
#[cfg(test)]
mod tests;
mod worker;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(crate) use self::{
    api::api,
    worker::{reserve_uids, worker},
};
use crate::config::Config;

/// Returns the URL at which a local client reaches a server that listens on `address`.
pub(crate) fn endpoint(config: &Config, address: SocketAddr) -> String {
    let scheme = if config.api.tls_cert.is_some() { "https" } else { "http" };
    format!("{scheme}://{}", reachable(address))
}

/// Replaces an unspecified address with loopback.
pub(crate) fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, address.port()).into(),
        _ => address,
    }
}
