//! Configuration. Precedence: flags, environment, file, defaults. Unknown keys and variables are
//! refused.

mod file;
pub(crate) mod keys;
mod load;
#[cfg(test)]
mod reference;
mod show;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroU64, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Result, bail};
use codelia_types::{Mode, NetworkMode};
use figment::Figment;
use secrecy::SecretString;
use serde::{Deserialize, Deserializer};

use crate::{detach_keys::DetachKeys, output};

#[cfg(test)]
pub(crate) use self::load::tests;
pub(crate) use self::{
    load::{Flag, config_home, load, state_home},
    show::show,
};

/// The effective configuration, with the source of each value.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    figment: Figment,
    warnings: Vec<String>,
}

/// The effective configuration.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    pub(crate) data_dir: PathBuf,
    /// Directory that lists the running `up`s.
    pub(crate) instances_dir: Option<PathBuf>,
    pub(crate) profile: Profile,
    pub(crate) database: Database,
    pub(crate) output: OutputStore,
    pub(crate) api: Api,
    pub(crate) metrics: Metrics,
    #[serde(default)]
    pub(crate) internal: Internal,
    pub(crate) worker: Worker,
    pub(crate) sandbox: Sandbox,
    pub(crate) egress: Egress,
    pub(crate) limits: Limits,
    pub(crate) approvals: Approvals,
    pub(crate) escape: Escape,
    pub(crate) retention: Retention,
    #[serde(default)]
    pub(crate) secrets: Secrets,
    pub(crate) log: Log,
    pub(crate) otlp: Otlp,
    pub(crate) client: Client,
}

/// Purpose of the installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Profile {
    Dev,
    Prod,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Database {
    pub(crate) url: Option<SecretString>,
    /// For all classes of statements together.
    pub(crate) max_connections: Option<NonZeroU32>,
    pub(crate) pooler: String,
    pub(crate) idle_timeout_seconds: NonZeroU64,
    pub(crate) statement_timeout_ms: NonZeroU64,
    pub(crate) read_timeout_ms: NonZeroU64,
    pub(crate) lock_timeout_ms: NonZeroU64,
}

/// Where the output of runs is stored.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutputStore {
    /// `postgres`, `file:///PATH` or `s3://BUCKET/PREFIX`.
    pub(crate) store: Option<String>,
    /// More output at a time goes to the store.
    pub(crate) inline_kb: u32,
    pub(crate) s3_endpoint: Option<String>,
    pub(crate) s3_region: String,
    pub(crate) s3_access_key_id: Option<String>,
    pub(crate) s3_secret_access_key: Option<SecretString>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Api {
    pub(crate) listen: SocketAddr,
    pub(crate) tls_cert: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
    /// Whether other machines may be served without TLS in profile prod.
    pub(crate) allow_plaintext: bool,
    pub(crate) max_connections: NonZeroUsize,
    pub(crate) max_connections_per_address: Option<NonZeroUsize>,
    pub(crate) max_streams_per_connection: NonZeroU32,
    pub(crate) stream_window_kb: NonZeroU32,
    pub(crate) connection_window_kb: NonZeroU32,
    pub(crate) first_request_timeout_seconds: NonZeroU64,
    pub(crate) idle_timeout_seconds: NonZeroU64,
    pub(crate) keepalive_interval_seconds: NonZeroU64,
    pub(crate) keepalive_timeout_seconds: NonZeroU64,
    pub(crate) message_timeout_seconds: NonZeroU64,
    pub(crate) max_calls_per_key: NonZeroUsize,
    pub(crate) max_watches_per_key: NonZeroUsize,
    pub(crate) max_request_mb_per_key: NonZeroUsize,
    pub(crate) list_reads_per_second: NonZeroU32,
    /// 0 turns the limit off.
    pub(crate) failed_keys_per_minute: u32,
    /// Origins with commas between them, or `*`.
    pub(crate) cors_origins: String,
    /// `spread` or `lowest_number`.
    pub(crate) placement: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Metrics {
    /// `None` if it was set to the empty string.
    #[serde(deserialize_with = "address_or_off")]
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) max_connections: NonZeroUsize,
    pub(crate) request_timeout_seconds: NonZeroU64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Internal {
    pub(crate) tls_ca: Option<PathBuf>,
    pub(crate) tls_cert: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Worker {
    pub(crate) id: Option<String>,
    pub(crate) listen: Option<String>,
    pub(crate) advertise: Option<String>,
    pub(crate) max_connections: NonZeroUsize,
    pub(crate) max_streams_per_connection: NonZeroU32,
    pub(crate) first_request_timeout_seconds: NonZeroU64,
    pub(crate) idle_timeout_seconds: NonZeroU64,
    pub(crate) keepalive_interval_seconds: NonZeroU64,
    pub(crate) keepalive_timeout_seconds: NonZeroU64,
    pub(crate) slots: Option<NonZeroUsize>,
    pub(crate) lease_ttl_seconds: NonZeroU64,
    /// Safety margin before the lease expires, in percent of the lease time; at most 50.
    pub(crate) lease_margin_percent: u32,
    pub(crate) poll_interval_ms: NonZeroU64,
    pub(crate) drain_grace_seconds: Option<u64>,
    pub(crate) file_call_timeout_seconds: NonZeroU64,
    /// Below this, the worker discards prepared sandboxes.
    pub(crate) min_free_memory_mb: u64,
    /// What limits the disk space of sessions.
    pub(crate) disk: codelia_worker::DiskChoice,
    /// With less free for sessions, the worker takes no new ones and starts no runs.
    pub(crate) disk_reserve_mb: Option<u64>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sandbox {
    pub(crate) mode: Option<Mode>,
    pub(crate) root: Option<PathBuf>,
    pub(crate) ttl_seconds: NonZeroU64,
    /// Network of runs that request none.
    #[serde(default, deserialize_with = "network")]
    pub(crate) network: Option<NetworkMode>,
    /// Cores.
    #[serde(deserialize_with = "cpu_cores")]
    pub(crate) cpu_limit: f64,
    pub(crate) memory_limit_mb: NonZeroU64,
    /// Policy file that applies to every command.
    pub(crate) policy: Option<PathBuf>,
    /// Directory with the operator's profiles.
    pub(crate) profiles_dir: Option<PathBuf>,
    pub(crate) allow_logical: Option<bool>,
    /// What becomes of limits that no cgroup can enforce.
    pub(crate) limit_enforcement: Option<LimitEnforcement>,
    /// User and group ids for sessions, if the worker is root.
    pub(crate) uid_base: Option<NonZeroU32>,
    pub(crate) uid_count: NonZeroU32,
    /// Directory with the ranges of user ids that session roots on this host have.
    pub(crate) uid_registry: PathBuf,
    /// Whether commands get only CPU time that nothing else uses (`cpu.idle`).
    pub(crate) cpu_idle: bool,
    /// Programs of the modes, by path or name.
    pub(crate) bwrap: PathBuf,
    pub(crate) nsjail: PathBuf,
    /// Mode `native`: how many active sessions keep their namespaces for the next run.
    pub(crate) native_templates: usize,
    /// Mode `container`: engine socket, runtime and default image.
    pub(crate) container_socket: PathBuf,
    pub(crate) container_runtime: Option<String>,
    pub(crate) container_image: String,
    /// Images of profiles: `python=codelia-python,…`.
    #[serde(deserialize_with = "pairs")]
    pub(crate) container_images: BTreeMap<String, String>,
    pub(crate) init: Option<PathBuf>,
    /// How long a read waits for a decision.
    #[serde(deserialize_with = "duration")]
    pub(crate) read_timeout: Duration,
}

/// Default and highest limits of runs. Without a value, a maximum is the built-in one.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Limits {
    pub(crate) timeout_seconds: NonZeroU32,
    /// Default of runs with a terminal.
    pub(crate) interactive_timeout_seconds: Option<NonZeroU32>,
    /// Default of runs whose caller does not wait.
    pub(crate) detached_timeout_seconds: Option<NonZeroU32>,
    pub(crate) max_timeout_seconds: Option<NonZeroU32>,
    /// How long a run may wait for a worker.
    pub(crate) queue_timeout_seconds: NonZeroU32,
    pub(crate) max_queue_timeout_seconds: Option<NonZeroU32>,
    /// The default is `sandbox.memory_limit_mb`.
    pub(crate) max_memory_mb: Option<NonZeroU32>,
    /// The default is `sandbox.cpu_limit`.
    #[serde(default, deserialize_with = "optional_cpu_cores")]
    pub(crate) max_cpus: Option<f64>,
    pub(crate) pids: NonZeroU32,
    pub(crate) max_pids: Option<NonZeroU32>,
    pub(crate) open_files: NonZeroU32,
    pub(crate) max_open_files: Option<NonZeroU32>,
    /// Output that is stored.
    pub(crate) output_mb: NonZeroU32,
    pub(crate) max_output_mb: Option<NonZeroU32>,
    pub(crate) cpu_time_seconds: NonZeroU32,
    pub(crate) max_cpu_time_seconds: Option<NonZeroU32>,
    /// Size of the largest file that a command may write.
    pub(crate) file_mb: NonZeroU32,
    pub(crate) max_file_mb: Option<NonZeroU32>,
    /// Size of each private temporary file system.
    pub(crate) tmp_mb: NonZeroU32,
    pub(crate) max_tmp_mb: Option<NonZeroU32>,
    /// Size of all files of a session together.
    pub(crate) disk_mb: NonZeroU32,
    pub(crate) max_disk_mb: Option<NonZeroU32>,
    /// Number of files, directories and links of a session.
    pub(crate) inodes: NonZeroU32,
    pub(crate) max_inodes: Option<NonZeroU32>,
}

/// The egress proxy of runs with network mode `proxy`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Egress {
    /// DNS servers with commas between them; empty for those of `/etc/resolv.conf`.
    pub(crate) resolvers: String,
    /// Networks that may be reached although they are private, with commas between them.
    pub(crate) private_addresses: String,
    /// `socks5://IP:PORT` or `http://IP:PORT`.
    pub(crate) upstream: Option<String>,
    /// Those of tenants: `TENANT=URL` with commas between them.
    pub(crate) tenant_upstreams: String,
    pub(crate) credentials_file: Option<PathBuf>,
    pub(crate) ca_dir: Option<PathBuf>,
    pub(crate) extra_roots_file: Option<PathBuf>,
    #[serde(deserialize_with = "duration")]
    pub(crate) ask_timeout: Duration,
    #[serde(deserialize_with = "duration")]
    pub(crate) connect_timeout: Duration,
    #[serde(deserialize_with = "duration")]
    pub(crate) header_timeout: Duration,
}

/// What becomes of limits that no cgroup can enforce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LimitEnforcement {
    /// Isolating modes are not usable.
    Strict,
    /// The worker watches them and ends commands that exceed them.
    BestEffort,
}

/// Requests that a person decides about.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Approvals {
    /// How long a run waits for a decision.
    #[serde(deserialize_with = "duration")]
    pub(crate) timeout: Duration,
}

/// The responses to attempts to leave a sandbox, by severity.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Escape {
    pub(crate) hostile: String,
    pub(crate) critical: String,
    pub(crate) high: String,
    pub(crate) low: String,
    pub(crate) canary_files: bool,
    pub(crate) webhook_url: Option<SecretString>,
    pub(crate) webhook_secret_file: Option<PathBuf>,
}

/// How long rows are kept.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Retention {
    #[serde(deserialize_with = "duration")]
    pub(crate) runs: Duration,
    #[serde(deserialize_with = "duration")]
    pub(crate) output: Duration,
    #[serde(deserialize_with = "duration")]
    pub(crate) events: Duration,
    #[serde(deserialize_with = "duration")]
    pub(crate) audit: Duration,
}

/// Parses a time with its unit, such as `7d`.
fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    let parsed = humantime::parse_duration(&text);
    parsed
        .map_err(|error| serde::de::Error::custom(format!("{text:?} is not a duration such as 7d: {error}")))
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Secrets {
    /// Key that encrypts secret variables. Api and worker need the same one.
    pub(crate) key_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Log {
    pub(crate) format: String,
    pub(crate) filter: Option<String>,
    /// Whether the api logs a line for each call.
    pub(crate) access: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Otlp {
    pub(crate) endpoint: Option<String>,
    /// The share of traces that is sent.
    pub(crate) sample_ratio: f64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Client {
    /// Named server to call.
    pub(crate) context: Option<String>,
    pub(crate) endpoint: Option<String>,
    pub(crate) api_key: Option<SecretString>,
    pub(crate) tls_ca: Option<PathBuf>,
    /// Keys that detach from a run's terminal.
    pub(crate) detach_keys: DetachKeys,
}

impl Config {
    /// Directory of the worker's sessions.
    pub(crate) fn sandbox_root(&self) -> PathBuf {
        self.sandbox.root.clone().unwrap_or_else(|| self.data_dir.join("worker"))
    }

    /// Whether runs without isolation are allowed.
    pub(crate) fn allow_logical(&self) -> bool {
        self.sandbox.allow_logical.unwrap_or(self.profile == Profile::Dev)
    }

    /// Whether limits that no cgroup can enforce are watched.
    pub(crate) fn watch_limits(&self) -> Result<bool> {
        let watch = self.sandbox.limit_enforcement == Some(LimitEnforcement::BestEffort);
        if watch && self.profile == Profile::Prod {
            bail!(
                "sandbox.limit_enforcement: best_effort is not allowed in profile prod ({})",
                codelia_policy::limits_remedy(Mode::Bwrap, true)
            );
        }
        Ok(watch)
    }

    /// Default lifetime of a session.
    pub(crate) fn session_ttl(&self) -> Duration {
        Duration::from_secs(self.sandbox.ttl_seconds.get())
    }
}

impl Loaded {
    /// Whether the key has a value other than its default.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.figment.find_metadata(path).is_some_and(|metadata| metadata.name != load::DEFAULT)
    }

    /// The source of a value: `flag`, `env:NAME` or `file:PATH`; `None` if the key is not set.
    pub(crate) fn source(&self, path: &str) -> Option<String> {
        self.figment.find_metadata(path).filter(|_| self.is_set(path)).map(show::source)
    }

    /// Prints warnings to stderr.
    pub(crate) fn print_warnings(&self) {
        for warning in &self.warnings {
            output::write_messages(&format!("codelia: warning: {warning}"));
        }
    }

    /// Logs warnings.
    pub(crate) fn log_warnings(&self) {
        for warning in &self.warnings {
            tracing::warn!("{warning}");
        }
    }
}

/// Parses a network mode. `disabled` and `enabled` are older names of `none` and `proxy`.
fn network<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NetworkMode>, D::Error> {
    let text = String::deserialize(from)?;
    match text.as_str() {
        "disabled" => Ok(Some(NetworkMode::None)),
        "enabled" => Ok(Some(NetworkMode::Proxy)),
        other => other.parse().map(Some).map_err(serde::de::Error::custom),
    }
}

fn address_or_off<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(serde::de::Error::custom) }
}

/// Parses `a=b,c=d`.
fn pairs<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let text = String::deserialize(from)?;
    let pair = |part: &str| match part.trim().split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(serde::de::Error::custom(format!("{part:?} is not NAME=VALUE"))),
    };
    text.split(',').filter(|part| !part.trim().is_empty()).map(pair).collect()
}

fn optional_cpu_cores<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
    cpu_cores(from).map(Some)
}

fn cpu_cores<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let value = f64::deserialize(from)?;
    if value.is_finite() && value >= 0.001 {
        Ok(value)
    } else {
        Err(serde::de::Error::custom(format!("{value} is not a number of cores")))
    }
}
