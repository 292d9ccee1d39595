//! All configuration keys with their environment variables and defaults. Others are refused.

/// Type of a key's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Integer,
    Float,
    Bool,
}

/// A configuration key.
#[derive(Debug)]
pub(crate) struct Key {
    /// Path in the configuration file.
    pub(crate) path: &'static str,
    /// Environment variable.
    pub(crate) env: &'static str,
    pub(crate) kind: Kind,
    /// Value if it is not set.
    pub(crate) default: Option<&'static str>,
    /// What applies while there is no value.
    pub(crate) unset: &'static str,
    /// Never printed.
    pub(crate) secret: bool,
    /// Former name, accepted with a warning until the next version.
    pub(crate) former: Option<FormerName>,
}

/// A deprecated name of a key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FormerName {
    pub(crate) path: &'static str,
    pub(crate) env: &'static str,
}

const fn key(path: &'static str, env: &'static str, kind: Kind) -> Key {
    Key { path, env, kind, default: None, unset: "", secret: false, former: None }
}

impl Key {
    const fn or(self, default: &'static str) -> Self {
        Self { default: Some(default), ..self }
    }

    const fn unset(self, unset: &'static str) -> Self {
        Self { unset, ..self }
    }

    const fn secret(self) -> Self {
        Self { secret: true, ..self }
    }

    const fn formerly(self, path: &'static str, env: &'static str) -> Self {
        Self { former: Some(FormerName { path, env }), ..self }
    }
}

use Kind::{Bool, Float, Integer, Text};

/// All keys, in the order of `codelia config show`.
#[rustfmt::skip]
pub(crate) const KEYS: &[Key] = &[
    key("data_dir", "CODELIA_DATA_DIR", Text),
    key("instances_dir", "CODELIA_INSTANCES_DIR", Text).unset("/run/codelia/instances; a user: ~/.local/state/codelia-instances"),
    key("profile", "CODELIA_PROFILE", Text).or("dev"),
    key("database.url", "CODELIA_DATABASE_URL", Text).secret().unset("`up` starts a private one"),
    key("database.max_connections", "CODELIA_DATABASE_MAX_CONNECTIONS", Integer).unset("16; 6 for a worker"),
    key("database.pooler", "CODELIA_DATABASE_POOLER", Text).or("none"),
    key("database.idle_timeout_seconds", "CODELIA_DATABASE_IDLE_TIMEOUT_SECONDS", Integer).or("60"),
    key("database.statement_timeout_ms", "CODELIA_DATABASE_STATEMENT_TIMEOUT_MS", Integer).or("30000"),
    key("database.read_timeout_ms", "CODELIA_DATABASE_READ_TIMEOUT_MS", Integer).or("5000"),
    key("database.lock_timeout_ms", "CODELIA_DATABASE_LOCK_TIMEOUT_MS", Integer).or("3000"),
    key("output.store", "CODELIA_OUTPUT_STORE", Text).unset("postgres; `up` with its own database: DATA_DIR/output"),
    key("output.inline_kb", "CODELIA_OUTPUT_INLINE_KB", Integer).or("64"),
    key("output.s3_endpoint", "CODELIA_OUTPUT_S3_ENDPOINT", Text).unset("AWS"),
    key("output.s3_region", "CODELIA_OUTPUT_S3_REGION", Text).or("us-east-1"),
    key("output.s3_access_key_id", "CODELIA_OUTPUT_S3_ACCESS_KEY_ID", Text).unset("what the AWS environment provides"),
    key("output.s3_secret_access_key", "CODELIA_OUTPUT_S3_SECRET_ACCESS_KEY", Text).secret().unset("what the AWS environment provides"),
    key("api.listen", "CODELIA_API_LISTEN", Text).or("127.0.0.1:7300"),
    key("api.tls_cert", "CODELIA_API_TLS_CERT", Text).unset("no TLS"),
    key("api.tls_key", "CODELIA_API_TLS_KEY", Text).unset("no TLS"),
    key("api.allow_plaintext", "CODELIA_API_ALLOW_PLAINTEXT", Bool).or("false"),
    key("api.max_connections", "CODELIA_API_MAX_CONNECTIONS", Integer).or("2048"),
    key("api.max_connections_per_address", "CODELIA_API_MAX_CONNECTIONS_PER_ADDRESS", Integer).unset("half of all connections"),
    key("api.max_streams_per_connection", "CODELIA_API_MAX_STREAMS_PER_CONNECTION", Integer).or("1024"),
    key("api.stream_window_kb", "CODELIA_API_STREAM_WINDOW_KB", Integer).or("256"),
    key("api.connection_window_kb", "CODELIA_API_CONNECTION_WINDOW_KB", Integer).or("16384"),
    key("api.first_request_timeout_seconds", "CODELIA_API_FIRST_REQUEST_TIMEOUT_SECONDS", Integer).or("10"),
    key("api.idle_timeout_seconds", "CODELIA_API_IDLE_TIMEOUT_SECONDS", Integer).or("300"),
    key("api.keepalive_interval_seconds", "CODELIA_API_KEEPALIVE_INTERVAL_SECONDS", Integer).or("30"),
    key("api.keepalive_timeout_seconds", "CODELIA_API_KEEPALIVE_TIMEOUT_SECONDS", Integer).or("10"),
    key("api.message_timeout_seconds", "CODELIA_API_MESSAGE_TIMEOUT_SECONDS", Integer).or("60"),
    key("api.max_calls_per_key", "CODELIA_API_MAX_CALLS_PER_KEY", Integer).or("1024"),
    key("api.max_watches_per_key", "CODELIA_API_MAX_WATCHES_PER_KEY", Integer).or("256"),
    key("api.max_request_mb_per_key", "CODELIA_API_MAX_REQUEST_MB_PER_KEY", Integer).or("128"),
    key("api.list_reads_per_second", "CODELIA_API_LIST_READS_PER_SECOND", Integer).or("50"),
    key("api.failed_keys_per_minute", "CODELIA_API_FAILED_KEYS_PER_MINUTE", Integer).or("120"),
    key("api.cors_origins", "CODELIA_API_CORS_ORIGINS", Text).or(""),
    key("api.placement", "CODELIA_API_PLACEMENT", Text).or("spread"),
    key("metrics.listen", "CODELIA_METRICS_LISTEN", Text).or("127.0.0.1:7301"),
    key("metrics.max_connections", "CODELIA_METRICS_MAX_CONNECTIONS", Integer).or("32"),
    key("metrics.request_timeout_seconds", "CODELIA_METRICS_REQUEST_TIMEOUT_SECONDS", Integer).or("10"),
    key("internal.tls_ca", "CODELIA_INTERNAL_TLS_CA", Text).unset("Unix sockets only"),
    key("internal.tls_cert", "CODELIA_INTERNAL_TLS_CERT", Text).unset("Unix sockets only"),
    key("internal.tls_key", "CODELIA_INTERNAL_TLS_KEY", Text).unset("Unix sockets only"),
    key("worker.id", "CODELIA_WORKER_ID", Text).unset("the host name"),
    key("worker.listen", "CODELIA_WORKER_LISTEN", Text).unset("a Unix socket in DATA_DIR"),
    key("worker.advertise", "CODELIA_WORKER_ADVERTISE", Text).unset("the address it listens on"),
    key("worker.max_connections", "CODELIA_WORKER_MAX_CONNECTIONS", Integer).or("256"),
    key("worker.max_streams_per_connection", "CODELIA_WORKER_MAX_STREAMS_PER_CONNECTION", Integer).or("16384"),
    key("worker.first_request_timeout_seconds", "CODELIA_WORKER_FIRST_REQUEST_TIMEOUT_SECONDS", Integer).or("10"),
    key("worker.idle_timeout_seconds", "CODELIA_WORKER_IDLE_TIMEOUT_SECONDS", Integer).or("600"),
    key("worker.keepalive_interval_seconds", "CODELIA_WORKER_KEEPALIVE_INTERVAL_SECONDS", Integer).or("5"),
    key("worker.keepalive_timeout_seconds", "CODELIA_WORKER_KEEPALIVE_TIMEOUT_SECONDS", Integer).or("10"),
    key("worker.slots", "CODELIA_WORKER_SLOTS", Integer).unset("4 per core"),
    key("worker.lease_ttl_seconds", "CODELIA_WORKER_LEASE_TTL_SECONDS", Integer).or("15"),
    key("worker.lease_margin_percent", "CODELIA_WORKER_LEASE_MARGIN_PERCENT", Integer).or("20"),
    key("worker.poll_interval_ms", "CODELIA_WORKER_POLL_INTERVAL_MS", Integer).or("500"),
    key("worker.drain_grace_seconds", "CODELIA_WORKER_DRAIN_GRACE_SECONDS", Integer).unset("30; 2 for `up`"),
    key("worker.file_call_timeout_seconds", "CODELIA_WORKER_FILE_CALL_TIMEOUT_SECONDS", Integer).or("60"),
    key("worker.disk_reserve_mb", "CODELIA_WORKER_DISK_RESERVE_MB", Integer).unset("1024; at most a tenth of the file system"),
    key("worker.min_free_memory_mb", "CODELIA_WORKER_MIN_FREE_MEMORY_MB", Integer).or("256").formerly("worker.spare_memory_mb", "CODELIA_WORKER_SPARE_MEMORY_MB"),
    key("worker.disk", "CODELIA_WORKER_DISK", Text).or("auto"),
    key("sandbox.mode", "CODELIA_SANDBOX_MODE", Text).unset("the strongest usable mode"),
    key("sandbox.root", "CODELIA_SANDBOX_ROOT", Text).unset("DATA_DIR/worker"),
    key("sandbox.ttl_seconds", "CODELIA_SANDBOX_TTL_SECONDS", Integer).or("3600"),
    key("sandbox.network", "CODELIA_SANDBOX_NETWORK", Text).unset("none, unless a policy sets proxy"),
    key("sandbox.cpu_limit", "CODELIA_SANDBOX_CPU_LIMIT", Float).or("1.0"),
    key("sandbox.memory_limit_mb", "CODELIA_SANDBOX_MEMORY_LIMIT_MB", Integer).or("512"),
    key("sandbox.policy", "CODELIA_SANDBOX_POLICY", Text).unset("no host paths are exposed"),
    key("sandbox.profiles_dir", "CODELIA_SANDBOX_PROFILES_DIR", Text).unset("only the profiles of Codelia"),
    key("sandbox.allow_logical", "CODELIA_SANDBOX_ALLOW_LOGICAL", Bool).unset("true; false in profile prod"),
    key("sandbox.limit_enforcement", "CODELIA_SANDBOX_LIMIT_ENFORCEMENT", Text).unset("strict; `up` without cgroups: best_effort"),
    key("sandbox.uid_base", "CODELIA_SANDBOX_UID_BASE", Integer).unset("a free range for each root"),
    key("sandbox.uid_count", "CODELIA_SANDBOX_UID_COUNT", Integer).or("65536"),
    key("sandbox.uid_registry", "CODELIA_SANDBOX_UID_REGISTRY", Text).or("/var/lib/codelia/uids"),
    key("sandbox.cpu_idle", "CODELIA_SANDBOX_CPU_IDLE", Bool).or("false").formerly("sandbox.yields", "CODELIA_SANDBOX_YIELDS"),
    key("sandbox.bwrap", "CODELIA_BWRAP", Text).or("bwrap"),
    key("sandbox.nsjail", "CODELIA_NSJAIL", Text).or("nsjail"),
    key("sandbox.native_templates", "CODELIA_SANDBOX_NATIVE_TEMPLATES", Integer).or("64"),
    key("sandbox.container_socket", "CODELIA_SANDBOX_CONTAINER_SOCKET", Text).or("/var/run/docker.sock"),
    key("sandbox.container_runtime", "CODELIA_SANDBOX_CONTAINER_RUNTIME", Text).unset("the engine's default"),
    key("sandbox.container_image", "CODELIA_SANDBOX_CONTAINER_IMAGE", Text).or("codelia-base"),
    key("sandbox.container_images", "CODELIA_SANDBOX_CONTAINER_IMAGES", Text).or("node=codelia-node,python=codelia-python,rust=codelia-rust"),
    key("sandbox.init", "CODELIA_INIT", Text).unset("codelia-init next to codelia"),
    key("sandbox.read_timeout", "CODELIA_SANDBOX_READ_TIMEOUT", Text).or("2m"),
    key("egress.resolvers", "CODELIA_EGRESS_RESOLVERS", Text).or(""),
    key("egress.private_addresses", "CODELIA_EGRESS_PRIVATE_ADDRESSES", Text).or(""),
    key("egress.upstream", "CODELIA_EGRESS_UPSTREAM", Text).unset("connections are direct"),
    key("egress.tenant_upstreams", "CODELIA_EGRESS_TENANT_UPSTREAMS", Text).or(""),
    key("egress.credentials_file", "CODELIA_EGRESS_CREDENTIALS_FILE", Text).unset("no credentials"),
    key("egress.ca_dir", "CODELIA_EGRESS_CA_DIR", Text).unset("DATA_DIR/egress-ca, if there are credentials"),
    key("egress.extra_roots_file", "CODELIA_EGRESS_EXTRA_ROOTS_FILE", Text).unset("the system's certificates"),
    key("egress.ask_timeout", "CODELIA_EGRESS_ASK_TIMEOUT", Text).or("2m"),
    key("egress.connect_timeout", "CODELIA_EGRESS_CONNECT_TIMEOUT", Text).or("15s"),
    key("egress.header_timeout", "CODELIA_EGRESS_HEADER_TIMEOUT", Text).or("10s"),
    key("limits.timeout_seconds", "CODELIA_LIMITS_TIMEOUT_SECONDS", Integer).or("120"),
    key("limits.interactive_timeout_seconds", "CODELIA_LIMITS_INTERACTIVE_TIMEOUT_SECONDS", Integer).unset("14400, within the maximum"),
    key("limits.detached_timeout_seconds", "CODELIA_LIMITS_DETACHED_TIMEOUT_SECONDS", Integer).unset("14400, within the maximum"),
    key("limits.max_timeout_seconds", "CODELIA_LIMITS_MAX_TIMEOUT_SECONDS", Integer).unset("86400, at least the default"),
    key("limits.queue_timeout_seconds", "CODELIA_LIMITS_QUEUE_TIMEOUT_SECONDS", Integer).or("600"),
    key("limits.max_queue_timeout_seconds", "CODELIA_LIMITS_MAX_QUEUE_TIMEOUT_SECONDS", Integer).unset("86400, at least the default"),
    key("limits.max_memory_mb", "CODELIA_LIMITS_MAX_MEMORY_MB", Integer).unset("2048, at least the default"),
    key("limits.max_cpus", "CODELIA_LIMITS_MAX_CPUS", Float).unset("2.0, at least the default"),
    key("limits.pids", "CODELIA_LIMITS_PIDS", Integer).or("100"),
    key("limits.max_pids", "CODELIA_LIMITS_MAX_PIDS", Integer).unset("500, at least the default"),
    key("limits.open_files", "CODELIA_LIMITS_OPEN_FILES", Integer).or("1024"),
    key("limits.max_open_files", "CODELIA_LIMITS_MAX_OPEN_FILES", Integer).unset("4096, at least the default"),
    key("limits.output_mb", "CODELIA_LIMITS_OUTPUT_MB", Integer).or("10"),
    key("limits.max_output_mb", "CODELIA_LIMITS_MAX_OUTPUT_MB", Integer).unset("100, at least the default"),
    key("limits.cpu_time_seconds", "CODELIA_LIMITS_CPU_TIME_SECONDS", Integer).or("120"),
    key("limits.max_cpu_time_seconds", "CODELIA_LIMITS_MAX_CPU_TIME_SECONDS", Integer).unset("86400, at least the default"),
    key("limits.file_mb", "CODELIA_LIMITS_FILE_MB", Integer).or("1024"),
    key("limits.max_file_mb", "CODELIA_LIMITS_MAX_FILE_MB", Integer).unset("10240, at least the default"),
    key("limits.tmp_mb", "CODELIA_LIMITS_TMP_MB", Integer).or("64"),
    key("limits.max_tmp_mb", "CODELIA_LIMITS_MAX_TMP_MB", Integer).unset("1024, at least the default"),
    key("limits.disk_mb", "CODELIA_LIMITS_DISK_MB", Integer).or("10240"),
    key("limits.max_disk_mb", "CODELIA_LIMITS_MAX_DISK_MB", Integer).unset("102400, at least the default"),
    key("limits.inodes", "CODELIA_LIMITS_INODES", Integer).or("1000000"),
    key("limits.max_inodes", "CODELIA_LIMITS_MAX_INODES", Integer).unset("10000000, at least the default"),
    key("approvals.timeout", "CODELIA_APPROVALS_TIMEOUT", Text).or("10m"),
    key("escape.hostile", "CODELIA_ESCAPE_HOSTILE", Text).or("terminate,quarantine_tool,alert"),
    key("escape.critical", "CODELIA_ESCAPE_CRITICAL", Text).or("alert"),
    key("escape.high", "CODELIA_ESCAPE_HIGH", Text).or("alert"),
    key("escape.low", "CODELIA_ESCAPE_LOW", Text).or("none"),
    key("escape.canary_files", "CODELIA_ESCAPE_CANARY_FILES", Bool).or("false"),
    key("escape.webhook_url", "CODELIA_ESCAPE_WEBHOOK_URL", Text).unset("no webhook").secret(),
    key("escape.webhook_secret_file", "CODELIA_ESCAPE_WEBHOOK_SECRET_FILE", Text).unset("required with a webhook"),
    key("retention.runs", "CODELIA_RETENTION_RUNS", Text).or("1d"),
    key("retention.output", "CODELIA_RETENTION_OUTPUT", Text).or("1d"),
    key("retention.events", "CODELIA_RETENTION_EVENTS", Text).or("7d"),
    key("retention.audit", "CODELIA_RETENTION_AUDIT", Text).or("90d"),
    key("secrets.key_file", "CODELIA_SECRETS_KEY_FILE", Text).unset("no secrets; `up`: DATA_DIR/secrets.key"),
    key("log.format", "CODELIA_LOG_FORMAT", Text).or("human"),
    key("log.filter", "CODELIA_LOG_FILTER", Text).unset("info; warn for `up`"),
    key("log.access", "CODELIA_LOG_ACCESS", Bool).or("true"),
    key("otlp.endpoint", "CODELIA_OTLP_ENDPOINT", Text).unset("no export"),
    key("otlp.sample_ratio", "CODELIA_OTLP_SAMPLE_RATIO", Float).or("1.0"),
    key("client.context", "CODELIA_CONTEXT", Text).unset("see `codelia context show`"),
    key("client.endpoint", "CODELIA_ENDPOINT", Text).unset("DATA_DIR/client.toml"),
    key("client.api_key", "CODELIA_API_KEY", Text).secret().unset("DATA_DIR/client.toml"),
    key("client.tls_ca", "CODELIA_CLIENT_TLS_CA", Text).unset("the system's certificates"),
    key("client.detach_keys", "CODELIA_CLIENT_DETACH_KEYS", Text).or("ctrl-p,ctrl-q"),
];

/// Variable that names the configuration file.
pub(crate) const FILE_VARIABLE: &str = "CODELIA_CONFIG";

/// Prefix of variables that only tests use.
const TEST_PREFIX: &str = "CODELIA_TEST_";

/// Largest edit distance of a suggested name.
const MAX_HINT_DISTANCE: usize = 3;

/// Finds a key by its path.
pub(crate) fn by_path(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

/// Whether a variable has our prefix but belongs to no key.
pub(crate) fn is_unknown_variable(name: &str) -> bool {
    name.starts_with("CODELIA_")
        && !name.starts_with(TEST_PREFIX)
        && name != FILE_VARIABLE
        && KEYS.iter().all(|key| key.env != name && key.former.is_none_or(|former| former.env != name))
}

/// Returns `; did you mean X?` if one of `known` is similar.
pub(crate) fn hint<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> String {
    let nearest = known.map(|name| (distance(wrong, name), name)).min();
    nearest
        .filter(|(distance, _)| *distance <= MAX_HINT_DISTANCE)
        .map(|(_, name)| format!("; did you mean {name}?"))
        .unwrap_or_default()
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let nearest = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], nearest);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_named_after_their_keys() {
        let exceptions = [
            "sandbox.init",
            "sandbox.bwrap",
            "sandbox.nsjail",
            "client.context",
            "client.endpoint",
            "client.api_key",
        ];
        for key in KEYS.iter().filter(|key| !exceptions.contains(&key.path)) {
            assert_eq!(key.env, format!("CODELIA_{}", key.path.replace('.', "_").to_uppercase()));
        }
    }

    #[test]
    fn similar_names_get_a_hint() {
        let names = || KEYS.iter().map(|key| key.path);
        assert_eq!(hint("sandbox.mod", names()), "; did you mean sandbox.mode?");
        assert_eq!(hint("completely.else", names()), "");
    }
}
