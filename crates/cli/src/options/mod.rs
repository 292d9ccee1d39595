//! Converts the configuration into the options of each part.

mod api;
mod connections;
mod database;
mod egress;
mod escape;
mod limits;
mod output;
mod retention;
mod secrets;
mod tls;
mod worker;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

pub(crate) use self::{
    api::api,
    connections::{metrics, raise_open_files},
    database::{DatabaseUse, database, store},
    output::output,
    secrets::secret_key,
    worker::{host_id, reserve_uids, separates_users, worker},
};
use crate::config::Config;

const MIB: u64 = 1024 * 1024;

/// Defaults that differ between separate processes and `up`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServiceDefaults {
    /// Log filter, if none is configured.
    log_filter: &'static str,
    /// Time for calls and runs to end at shutdown, if none is configured.
    shutdown_grace: Duration,
}

/// Defaults of `codelia api` and `codelia worker`.
pub(crate) const SEPARATE: ServiceDefaults =
    ServiceDefaults { log_filter: "info,opentelemetry=warn", shutdown_grace: Duration::from_secs(30) };

/// Defaults of `codelia up`. A user waits for it to stop. The banner reports the mode, so the
/// worker's warnings about other modes are hidden.
pub(crate) const ALL_IN_ONE: ServiceDefaults = ServiceDefaults {
    log_filter: "warn,codelia_worker::sandbox::backends=error",
    shutdown_grace: Duration::from_secs(2),
};

/// Options for logs, traces and metrics of this process.
pub(crate) fn telemetry(
    config: &Config,
    service: &'static str,
    defaults: ServiceDefaults,
) -> Result<codelia_telemetry::Options> {
    let sample_ratio = config.otlp.sample_ratio;
    ensure!((0.0..=1.0).contains(&sample_ratio), "otlp.sample_ratio: must be from 0 to 1");
    Ok(codelia_telemetry::Options {
        format: config.log.format.parse().context("log.format")?,
        filter: config.log.filter.clone().unwrap_or_else(|| defaults.log_filter.to_owned()),
        otlp_endpoint: config.otlp.endpoint.clone(),
        sample_ratio,
        service,
    })
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

fn shutdown_grace(config: &Config, defaults: ServiceDefaults) -> Duration {
    config.worker.drain_grace_seconds.map_or(defaults.shutdown_grace, Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::loaded;

    pub(super) fn config(variables: &[(&str, &str)]) -> Config {
        loaded(None, &[], variables).unwrap().config
    }

    #[test]
    fn sample_ratio_is_a_share() {
        for (ratio, is_valid) in
            [("0", true), ("0.25", true), ("1", true), ("1.1", false), ("-1", false), ("NaN", false)]
        {
            let config = config(&[("CODELIA_OTLP_SAMPLE_RATIO", ratio)]);
            assert_eq!(telemetry(&config, "codelia-api", SEPARATE).is_ok(), is_valid, "{ratio}");
        }
    }

    #[test]
    fn unspecified_address_becomes_loopback() {
        let config = config(&[]);
        assert_eq!(endpoint(&config, "0.0.0.0:9".parse().unwrap()), "http://127.0.0.1:9");
        assert_eq!(endpoint(&config, "[::]:9".parse().unwrap()), "http://[::1]:9");
        assert_eq!(endpoint(&config, "10.0.0.1:9".parse().unwrap()), "http://10.0.0.1:9");
    }
}
