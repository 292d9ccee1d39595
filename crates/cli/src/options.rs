//! The configuration, turned into the options of each part.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use codelia_policy::{Ceilings, Limits, Policy};
use codelia_types::{Mode, WorkerId};
use codelia_worker::Listen;
use secrecy::ExposeSecret;

use crate::{
    config::{Config, Profile},
    policies,
};

const MIB: u64 = 1024 * 1024;
/// The longest a session may be asked to live.
const MAX_SESSION_TTL: Duration = Duration::from_secs(24 * 3600);
/// How long the rows of an ended session are kept.
const RETENTION: Duration = Duration::from_secs(24 * 3600);
/// From the polite signal to the one that cannot be refused.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// What differs between a part that runs alone and one inside `up`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    /// Which log lines are written if nobody says.
    pub(crate) log_filter: &'static str,
    /// How long what goes on may take to end.
    pub(crate) grace: Duration,
}

/// `codelia api` and `codelia worker`.
pub(crate) const ALONE: Manner =
    Manner { log_filter: "info,opentelemetry=warn", grace: Duration::from_secs(30) };
/// `codelia up`: somebody waits in front of it, and is told which mode was chosen and why that may
/// not be enough.
pub(crate) const TOGETHER: Manner =
    Manner { log_filter: "warn,codelia_worker::sandbox::backends=error", grace: Duration::from_secs(2) };

/// The configured database; `None` if there is none.
pub(crate) fn store(config: &Config) -> Result<Option<codelia_store::Options>> {
    let Some(url) = &config.database.url else { return Ok(None) };
    let options = codelia_store::Options::from_url(url.expose_secret()).context("database.url")?;
    Ok(Some(codelia_store::Options { max_connections: config.database.max_connections.get(), ..options }))
}

/// Logs, traces and metrics of this process.
pub(crate) fn telemetry(
    config: &Config,
    service: &'static str,
    manner: Manner,
) -> Result<codelia_telemetry::Options> {
    Ok(codelia_telemetry::Options {
        format: config.log.format.parse().context("log.format")?,
        filter: config.log.filter.clone().unwrap_or_else(|| manner.log_filter.to_owned()),
        otlp_endpoint: config.otlp.endpoint.clone(),
        service,
    })
}

/// The public server, with this mode for sessions that ask for none.
pub(crate) fn api(config: &Config, mode: Mode, manner: Manner) -> Result<codelia_api::Options> {
    let defaults = limits(config);
    let ceilings = ceilings(&defaults);
    let tls = pair(
        ("api.tls_cert", config.api.tls_cert.as_deref()),
        ("api.tls_key", config.api.tls_key.as_deref()),
    )?;
    if tls.is_none() && config.profile == Profile::Prod && !config.api.listen.ip().is_loopback() {
        tracing::warn!(listen = %config.api.listen, "the API is served without TLS");
    }
    Ok(codelia_api::Options {
        listen: config.api.listen,
        tls: tls.map(|(cert_pem, key_pem)| codelia_api::ServerTls { cert_pem, key_pem }),
        internal_tls: internal_tls(config)?.map(|tls| codelia_api::InternalTls {
            ca_pem: tls.ca_pem,
            cert_pem: tls.cert_pem,
            key_pem: tls.key_pem,
        }),
        policy: policy(config, &ceilings)?,
        ceilings,
        defaults,
        default_mode: mode,
        default_network: config.network(),
        session_ttl: config.session_ttl(),
        max_session_ttl: MAX_SESSION_TTL.max(config.session_ttl()),
        allow_logical: config.allow_logical(),
        shutdown_grace: grace(config, manner),
    })
}

/// What any command of this installation may do.
fn policy(config: &Config, ceilings: &Ceilings) -> Result<Policy> {
    let Some(file) = &config.sandbox.policy else { return Ok(Policy::installation()) };
    let policy = policies::read(file).context("sandbox.policy")?;
    policy.validate(ceilings).with_context(|| format!("sandbox.policy: {}", file.display()))?;
    Ok(policy.as_installation())
}

/// The worker; `id` and `socket` are taken if none is configured.
pub(crate) fn worker(
    config: &Config,
    id: &str,
    socket: &Path,
    manner: Manner,
) -> Result<codelia_worker::Options> {
    let configured = &config.worker;
    let lease_ttl = Duration::from_secs(configured.lease_ttl_seconds.get());
    Ok(codelia_worker::Options {
        id: worker_id(configured.id.as_deref().unwrap_or(id))?,
        root: std::path::absolute(config.sandbox_root())?,
        listen: configured.listen.as_deref().map_or_else(|| Ok(Listen::Unix(socket.to_owned())), listen)?,
        advertise: configured.advertise.clone(),
        internal_tls: internal_tls(config)?,
        slots: configured.slots.map_or_else(default_slots, std::num::NonZeroUsize::get),
        lease_ttl,
        lease_margin: lease_ttl * configured.lease_margin_percent / 100,
        poll_interval: Duration::from_millis(configured.poll_interval_ms.get()),
        drain_grace: grace(config, manner),
        kill_grace: KILL_GRACE,
        output_retention: RETENTION,
        min_free_memory_bytes: config.worker.spare_memory_mb.saturating_mul(MIB),
        uids: uids(config),
    })
}

/// The users that sessions get as their own: only root may give files away.
pub(crate) fn uids(config: &Config) -> Option<codelia_worker::UidRange> {
    rustix::process::geteuid().is_root().then_some(codelia_worker::UidRange {
        base: config.sandbox.uid_base.get(),
        count: config.sandbox.uid_count.get(),
    })
}

/// A worker's name if none is configured: the host's, in the letters ids have.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let label: String = name
        .trim()
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' })
        .take(48)
        .collect();
    if label.is_empty() { "worker".to_owned() } else { label }
}

/// Where a client on this machine reaches a server that listens on `address`.
pub(crate) fn endpoint(config: &Config, address: SocketAddr) -> String {
    let scheme = if config.api.tls_cert.is_some() { "https" } else { "http" };
    format!("{scheme}://{}", reachable(address))
}

/// The address itself, or loopback if it stands for all.
pub(crate) fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, address.port()).into(),
        _ => address,
    }
}

fn limits(config: &Config) -> Limits {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be a number of cores"
    )]
    let cpu_millis = (config.sandbox.cpu_limit * 1000.0).round() as u64;
    Limits {
        cpu_millis,
        memory_bytes: config.sandbox.memory_limit_mb.get().saturating_mul(MIB),
        ..Limits::default()
    }
}

/// Who sets a default above the usual ceiling means that much to be granted.
fn ceilings(defaults: &Limits) -> Ceilings {
    let usual = Ceilings::default().0;
    Ceilings(Limits {
        cpu_millis: usual.cpu_millis.max(defaults.cpu_millis),
        memory_bytes: usual.memory_bytes.max(defaults.memory_bytes),
        ..usual
    })
}

fn grace(config: &Config, manner: Manner) -> Duration {
    config.worker.drain_grace_seconds.map_or(manner.grace, Duration::from_secs)
}

fn default_slots() -> usize {
    4 * std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
}

fn worker_id(id: &str) -> Result<WorkerId> {
    id.parse().with_context(|| format!("worker.id: {id:?} is not [a-z0-9-]{{1,63}}"))
}

fn listen(text: &str) -> Result<Listen> {
    match text.strip_prefix("unix:") {
        Some(path) if path.starts_with('/') => Ok(Listen::Unix(PathBuf::from(path))),
        Some(_) => bail!("worker.listen: the path in {text:?} is not absolute"),
        None => {
            text.parse().map(Listen::Tcp).with_context(|| format!("worker.listen: {text:?} is no address"))
        }
    }
}

fn internal_tls(config: &Config) -> Result<Option<codelia_worker::InternalTls>> {
    let internal = &config.internal;
    let own = pair(
        ("internal.tls_cert", internal.tls_cert.as_deref()),
        ("internal.tls_key", internal.tls_key.as_deref()),
    )?;
    match (&internal.tls_ca, own) {
        (None, None) => Ok(None),
        (Some(ca), Some((cert_pem, key_pem))) => {
            Ok(Some(codelia_worker::InternalTls { ca_pem: pem("internal.tls_ca", ca)?, cert_pem, key_pem }))
        }
        _ => bail!("internal.tls_ca, internal.tls_cert and internal.tls_key are set together or not at all"),
    }
}

type Named<'a> = (&'static str, Option<&'a Path>);

fn pair(cert: Named<'_>, key: Named<'_>) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
    match (cert.1, key.1) {
        (None, None) => Ok(None),
        (Some(cert_path), Some(key_path)) => Ok(Some((pem(cert.0, cert_path)?, pem(key.0, key_path)?))),
        _ => bail!("{} and {} are set together or not at all", cert.0, key.0),
    }
}

fn pem(key: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{key}: cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use codelia_types::NetworkMode;

    use super::*;
    use crate::{config::tests::loaded, modes};

    fn config(variables: &[(&str, &str)]) -> Config {
        loaded(None, &[], variables).unwrap().config
    }

    fn api_of(variables: &[(&str, &str)]) -> codelia_api::Options {
        let config = config(variables);
        api(&config, modes::configured(&config).unwrap(), ALONE).unwrap()
    }

    #[test]
    fn the_six_sandbox_variables_act_on_the_options() {
        let variables = [
            ("CODELIA_SANDBOX_MODE", "bwrap"),
            ("CODELIA_SANDBOX_ROOT", "/srv/sessions"),
            ("CODELIA_SANDBOX_TTL_SECONDS", "77"),
            ("CODELIA_SANDBOX_NETWORK", "disabled"),
            ("CODELIA_SANDBOX_CPU_LIMIT", "1.5"),
            ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "64"),
        ];
        let api = api_of(&variables);
        assert_eq!(api.default_mode, Mode::Bwrap);
        assert_eq!(api.session_ttl, Duration::from_secs(77));
        assert_eq!(api.default_network, Some(NetworkMode::None));
        assert_eq!((api.defaults.cpu_millis, api.defaults.memory_bytes), (1500, 64 * MIB));
        let worker = worker(&config(&variables), "w", Path::new("/run/w.sock"), ALONE).unwrap();
        assert_eq!(worker.root, Path::new("/srv/sessions"));
    }

    #[test]
    fn without_them_the_defaults_of_the_limits_hold_and_no_network_is_promised() {
        let api = api_of(&[]);
        assert_eq!(api.defaults, Limits::default());
        assert_eq!(api.ceilings, Ceilings::default());
        assert_eq!(api.default_network, None);
        assert_eq!(
            api_of(&[("CODELIA_SANDBOX_NETWORK", "enabled")]).default_network,
            Some(NetworkMode::Host)
        );
    }

    #[test]
    fn a_default_above_the_usual_ceiling_raises_it() {
        let api =
            api_of(&[("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "4096"), ("CODELIA_SANDBOX_TTL_SECONDS", "999999")]);
        assert_eq!(api.ceilings.0.memory_bytes, 4096 * MIB);
        assert_eq!(api.max_session_ttl, Duration::from_secs(999_999));
    }

    #[test]
    fn a_worker_listens_on_a_socket_or_an_address_and_nothing_else() {
        assert!(matches!(listen("unix:/run/w.sock"), Ok(Listen::Unix(_))));
        assert!(matches!(listen("0.0.0.0:7400"), Ok(Listen::Tcp(_))));
        assert!(listen("unix:w.sock").unwrap_err().to_string().contains("worker.listen"));
        assert!(listen("somewhere").unwrap_err().to_string().contains("worker.listen"));
    }

    #[test]
    fn half_a_certificate_is_refused() {
        let config = config(&[("CODELIA_API_TLS_CERT", "/cert.pem")]);
        assert!(api(&config, Mode::Logical, ALONE).unwrap_err().to_string().contains("api.tls_key"));
        let config = config_with_half_internal();
        assert!(internal_tls(&config).unwrap_err().to_string().contains("internal.tls_ca"));
    }

    fn config_with_half_internal() -> Config {
        config(&[("CODELIA_INTERNAL_TLS_CA", "/ca.pem")])
    }

    #[test]
    fn an_address_that_stands_for_all_is_reached_over_loopback() {
        let config = config(&[]);
        assert_eq!(endpoint(&config, "0.0.0.0:9".parse().unwrap()), "http://127.0.0.1:9");
        assert_eq!(endpoint(&config, "[::]:9".parse().unwrap()), "http://[::1]:9");
        assert_eq!(endpoint(&config, "10.0.0.1:9".parse().unwrap()), "http://10.0.0.1:9");
    }
}
