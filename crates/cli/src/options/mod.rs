//! Puts together what each service is started with.

mod api;
#[cfg(test)]
mod tests;
mod worker;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub(crate) use self::{
    api::api,
    worker::{host_id, reserve_uids, separates_users, worker},
};
use crate::config::Config;

/// Fewer descriptors leave too few for the process's own work: sandboxes, files and the database.
const MIN_OPEN_FILES: u64 = 256;
/// More descriptors help no one, and some programs look at each of them.
const MAX_OPEN_FILES: u64 = 1024 * 1024;

/// Raises the soft limit of open files to the hard limit. Commands get the limit of their plan.
pub(crate) fn raise_open_files() -> Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(MAX_OPEN_FILES).max(open_files());
    ensure!(
        wanted >= MIN_OPEN_FILES,
        "the process may open only {wanted} files: raise the limit (ulimit -n) to at least {MIN_OPEN_FILES}"
    );
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit })
        .with_context(|| format!("cannot raise the limit of open files to {wanted}"))
}

/// How many files the process may open.
fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

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
