//! The network interfaces of this process's network namespace.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use rustix::io::Errno;

use crate::call::from_nix;

/// The addresses of all interfaces.
///
/// # Errors
/// As `getifaddrs(3)`.
pub fn addresses() -> Result<Vec<IpAddr>, Errno> {
    let interfaces = getifaddrs().map_err(from_nix)?;
    let address = |interface: nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    };
    Ok(interfaces.filter_map(address).collect())
}
