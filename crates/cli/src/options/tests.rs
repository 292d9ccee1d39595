//! Keys reach the options of the services, and impossible values are refused by their key.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};

use anyhow::Result;
use codelia_api::RunLimits;
use codelia_egress::{Upstream, UpstreamProtocol};
use codelia_policy::Limits;
use codelia_store::{OutputLocation, Pooler, Retention, SecretKey};
use codelia_types::{ByteSize, Mode, NetworkMode};

use super::{api, endpoint, worker};
use crate::{
    backends,
    config::{Config, tests::loaded},
    host::open_files,
};

const MIB: u64 = 1 << 20;

fn config(variables: &[(&str, &str)]) -> Config {
    loaded(None, &[], variables).unwrap().config
}

/// Why the variables are refused.
fn refused(variables: &[(&str, &str)]) -> String {
    loaded(None, &[], variables).unwrap_err().to_string()
}

fn api_of(variables: &[(&str, &str)]) -> codelia_api::Options {
    let config = config(variables);
    api(&config, backends::configured_mode(&config).unwrap()).unwrap()
}

fn api_error(variables: &[(&str, &str)]) -> String {
    format!("{:#}", api(&config(variables), Mode::Bwrap).unwrap_err())
}

fn worker_of(variables: &[(&str, &str)]) -> Result<codelia_worker::Options> {
    worker(&config(variables), "w", Path::new("/run/w.sock"), None)
}

#[test]
fn sandbox_variables_set_the_options() {
    let variables = [
        ("CODELIA_SANDBOX_MODE", "bwrap"),
        ("CODELIA_SANDBOX_ROOT", "/srv/sessions"),
        ("CODELIA_SANDBOX_TTL_SECONDS", "77"),
        ("CODELIA_SANDBOX_NETWORK", "none"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "1.5"),
        ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "64"),
    ];
    let api = api_of(&variables);
    assert_eq!(api.default_mode, Mode::Bwrap);
    assert_eq!(api.session_ttl, Duration::from_secs(77));
    assert_eq!(api.default_network, Some(NetworkMode::None));
    let defaults = &api.limits.defaults;
    assert_eq!((defaults.cpu_millicores, defaults.memory_bytes), (1500, 64 * MIB));
    assert_eq!(worker_of(&variables).unwrap().root, Path::new("/srv/sessions"));
}

#[test]
fn network_variable_sets_the_default_network() {
    assert_eq!(api_of(&[]).default_network, None);
    for (value, expected) in [("none", NetworkMode::None), ("proxy", NetworkMode::Proxy)] {
        let api = api_of(&[("CODELIA_SANDBOX_NETWORK", value)]);
        assert_eq!(api.default_network, Some(expected), "{value}");
    }
}

#[test]
fn default_network_host_needs_the_policy() {
    let policy = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    let path = policy.path().to_str().unwrap();
    let variables = [("CODELIA_SANDBOX_NETWORK", "host"), ("CODELIA_SANDBOX_POLICY", path)];
    let refused = api_error(&variables);
    assert!(refused.contains("sandbox.network"), "{refused}");
    fs::write(path, "network: {mode: host}").unwrap();
    assert_eq!(api_of(&variables).default_network, Some(NetworkMode::Host));
}

#[test]
fn bad_profile_is_refused_by_file_and_field() {
    let directory = tempfile::tempdir().unwrap();
    let variables = [("CODELIA_SANDBOX_PROFILES_DIR", directory.path().to_str().unwrap())];
    let file = directory.path().join("docs.yaml");
    fs::write(&file, "description: Documents\npolicy: {layout: {read_only_workspace: true}}")
        .unwrap();
    let profiles = api_of(&variables).profiles;
    assert_eq!(profiles.names(), "cargo, docs, node, python, shell");
    fs::write(&file, "description: Documents\nlimits: {pids: 0}").unwrap();
    let refused = api_error(&variables);
    assert!(refused.contains("docs.yaml") && refused.contains("limits.pids"), "{refused}");
    fs::write(directory.path().join("notes.txt"), "").unwrap();
    fs::remove_file(file).unwrap();
    assert!(api(&config(&variables), Mode::Bwrap).is_err());
}

#[test]
fn long_default_ttl_raises_the_maximum() {
    let api = api_of(&[("CODELIA_SANDBOX_TTL_SECONDS", "999999")]);
    assert_eq!(api.max_session_ttl, Duration::from_secs(999_999));
}

#[test]
fn connection_keys_set_the_limits() {
    let options = config(&[
        ("CODELIA_API_MAX_CONNECTIONS", "7"),
        ("CODELIA_API_MAX_STREAMS_PER_CONNECTION", "8"),
        ("CODELIA_API_STREAM_WINDOW", "64 KiB"),
        ("CODELIA_API_CONNECTION_WINDOW", "4 GiB"),
        ("CODELIA_API_FIRST_REQUEST_TIMEOUT", "9s"),
        ("CODELIA_API_IDLE_TIMEOUT", "10s"),
        ("CODELIA_API_KEEPALIVE_INTERVAL", "11s"),
        ("CODELIA_API_KEEPALIVE_TIMEOUT", "12s"),
    ]);
    let expected = codelia_server::Limits {
        max_connections: 7,
        max_connections_per_address: 4,
        first_request_timeout: Duration::from_secs(9),
        idle_timeout: Duration::from_secs(10),
        keepalive_interval: Duration::from_secs(11),
        keepalive_timeout: Duration::from_secs(12),
        max_streams_per_connection: 8,
        stream_window: ByteSize::kib(64),
        connection_window: ByteSize::mib(4096),
    };
    assert_eq!(options.api.connections(1024), expected);
    let per_address = config(&[("CODELIA_API_MAX_CONNECTIONS_PER_ADDRESS", "3")]);
    assert_eq!(per_address.api.connections(1024).max_connections_per_address, 3);
}

#[test]
fn connections_leave_descriptors_for_other_work() {
    let every = config(&[
        ("CODELIA_API_MAX_CONNECTIONS", "9999999"),
        ("CODELIA_WORKER_MAX_CONNECTIONS", "9999999"),
    ]);
    let open_files = open_files();
    let of_api = every.api.connections(open_files).max_connections;
    let of_worker = every.worker.connections(open_files).max_connections;
    let used = u64::try_from(of_api + of_worker).unwrap();
    assert!(used > 0 && used <= open_files * 5 / 8, "{used} of {open_files}");
}

#[test]
fn call_keys_set_the_limits() {
    let api = config(&[
        ("CODELIA_API_MAX_CALLS_PER_KEY", "7"),
        ("CODELIA_API_MAX_WATCHES_PER_KEY", "8"),
        ("CODELIA_API_MAX_REQUEST_SIZE_PER_KEY", "9 MiB"),
        ("CODELIA_API_MESSAGE_TIMEOUT", "10s"),
        ("CODELIA_API_LIST_READS_PER_SECOND", "11"),
        ("CODELIA_API_FAILED_KEYS_PER_MINUTE", "0"),
    ])
    .api;
    assert_eq!((api.max_calls_per_key.get(), api.max_watches_per_key.get()), (7, 8));
    assert_eq!(api.max_request_size_per_key, ByteSize::mib(9));
    assert_eq!(api.message_timeout, Duration::from_secs(10));
    assert_eq!((api.list_reads_per_second.get(), api.failed_keys_per_minute), (11, 0));
}

#[test]
fn worker_uses_few_connections() {
    let connections =
        |variables: &[(&str, &str)]| config(variables).database.of_worker().max_connections;
    assert_eq!(config(&[]).database.max_connections, None);
    assert_eq!(connections(&[]).unwrap().get(), 6);
    assert_eq!(connections(&[("CODELIA_DATABASE_MAX_CONNECTIONS", "9")]).unwrap().get(), 9);
}

#[test]
fn timeouts_and_pooler_are_configuration() {
    let database = config(&[
        ("CODELIA_DATABASE_POOLER", "transaction"),
        ("CODELIA_DATABASE_IDLE_TIMEOUT", "7s"),
        ("CODELIA_DATABASE_STATEMENT_TIMEOUT", "4s"),
        ("CODELIA_DATABASE_READ_TIMEOUT", "3s"),
        ("CODELIA_DATABASE_LOCK_TIMEOUT", "2s"),
    ])
    .database;
    assert_eq!(database.pooler, Pooler::Transaction);
    let times = [
        database.idle_timeout,
        database.statement_timeout,
        database.read_timeout,
        database.lock_timeout,
    ];
    assert_eq!(times.map(|time| time.as_secs()), [7, 4, 3, 2]);
    for (variable, value, key) in [
        ("CODELIA_DATABASE_POOLER", "session", "database.pooler: "),
        ("CODELIA_DATABASE_URL", "/hush", "database.url: "),
    ] {
        let error = refused(&[(variable, value)]);
        assert!(error.contains(key) && !error.contains("hush"), "{error}");
    }
}

#[test]
fn bucket_is_configured_with_its_server() {
    assert_eq!((config(&[]).output.store, config(&[]).output.inline), (None, ByteSize::kib(64)));
    let id = ("CODELIA_OUTPUT_S3_ACCESS_KEY_ID", "id");
    let mut variables = vec![
        ("CODELIA_OUTPUT_STORE", "s3://bucket/prefix"),
        ("CODELIA_OUTPUT_S3_ENDPOINT", "http://127.0.0.1:9"),
        ("CODELIA_OUTPUT_S3_REGION", "eu-1"),
        ("CODELIA_OUTPUT_S3_SECRET_ACCESS_KEY", "secret"),
        id,
    ];
    let output = config(&variables).output;
    let bucket = OutputLocation::S3 { bucket: "bucket".to_owned(), prefix: "prefix".to_owned() };
    assert_eq!(output.store, Some(bucket));
    assert_eq!(
        (output.s3_region.as_str(), output.s3_endpoint.as_deref()),
        ("eu-1", Some("http://127.0.0.1:9"))
    );
    assert!(output.check().is_ok());
    variables.retain(|variable| *variable != id);
    assert!(config(&variables).output.check().unwrap_err().to_string().contains("set both"));
    let wrong = refused(&[("CODELIA_OUTPUT_STORE", "/var/x")]);
    let expected =
        "output.store: expected postgres, file:///PATH or s3://BUCKET/PREFIX, found \"/var/x\"";
    assert!(wrong.contains(expected), "{wrong}");
}

#[test]
fn egress_keys_set_the_options() {
    let options = worker_of(&[
        ("CODELIA_EGRESS_RESOLVERS", "192.0.2.1, 192.0.2.2:5353,[2001:db8::1]:53,2001:db8::2"),
        ("CODELIA_EGRESS_PRIVATE_ADDRESSES", "10.1.0.0/16,fd00:1::/32"),
        ("CODELIA_EGRESS_UPSTREAM", "socks5://192.0.2.9:1080"),
        ("CODELIA_EGRESS_TENANT_UPSTREAMS", "a=http://192.0.2.8:3128, b=socks5://192.0.2.7:1080"),
        ("CODELIA_EGRESS_CREDENTIALS_FILE", "/etc/codelia/credentials.toml"),
        ("CODELIA_EGRESS_EXTRA_ROOTS_FILE", "/etc/codelia/roots.pem"),
        ("CODELIA_EGRESS_ASK_TIMEOUT", "30s"),
        ("CODELIA_EGRESS_CONNECT_TIMEOUT", "3s"),
        ("CODELIA_EGRESS_HEADER_TIMEOUT", "4s"),
        ("CODELIA_DATA_DIR", "/var/lib/codelia"),
    ]);
    let upstream =
        |protocol, address: &str| Upstream { protocol, address: address.parse().unwrap() };
    let resolvers = ["192.0.2.1:53", "192.0.2.2:5353", "[2001:db8::1]:53", "[2001:db8::2]:53"];
    let expected = codelia_egress::Options {
        resolvers: resolvers.map(|text| text.parse().unwrap()).to_vec(),
        private_addresses: ["10.1.0.0/16", "fd00:1::/32"]
            .map(|text| text.parse().unwrap())
            .to_vec(),
        upstream: Some(upstream(UpstreamProtocol::Socks5, "192.0.2.9:1080")),
        tenant_upstreams: [
            ("a".parse().unwrap(), upstream(UpstreamProtocol::Connect, "192.0.2.8:3128")),
            ("b".parse().unwrap(), upstream(UpstreamProtocol::Socks5, "192.0.2.7:1080")),
        ]
        .into(),
        credentials_file: Some("/etc/codelia/credentials.toml".into()),
        ca_dir: Some("/var/lib/codelia/egress-ca".into()),
        extra_roots_file: Some("/etc/codelia/roots.pem".into()),
        ask_timeout: Duration::from_secs(30),
        connect_timeout: Duration::from_secs(3),
        header_timeout: Duration::from_secs(4),
    };
    assert_eq!(options.unwrap().egress, expected);
    assert_eq!(worker_of(&[]).unwrap().egress, codelia_egress::Options::default());
}

#[test]
fn invalid_egress_value_names_its_key() {
    for (name, value) in [
        ("resolvers", "dns.example"),
        ("private_addresses", "10.0.0.0"),
        ("private_addresses", "10.0.0.0/33"),
        ("upstream", "socks5://proxy.example:1080"),
        ("upstream", "https://192.0.2.9:443"),
        ("upstream", "http://me:open-sesame@192.0.2.9:3128"),
        ("tenant_upstreams", "http://192.0.2.9:3128"),
        ("tenant_upstreams", "A=http://192.0.2.9:3128"),
        ("tenant_upstreams", "a=http://192.0.2.9:3128,a=http://192.0.2.8:3128"),
        ("tenant_upstreams", "a=http://me:open-sesame@192.0.2.9:3128"),
        ("tenant_upstreams", "http://me:open-sesame@192.0.2.9:3128"),
    ] {
        let variable = format!("CODELIA_EGRESS_{}", name.to_uppercase());
        let error = refused(&[(&variable, value)]);
        assert!(error.contains(&format!("egress.{name}")), "{error}");
        assert!(!error.contains("open-sesame"), "{error}");
    }
}

#[test]
fn every_limit_has_a_default_and_a_maximum() {
    let limits = api_of(&[
        ("CODELIA_LIMITS_TIMEOUT", "1s"),
        ("CODELIA_LIMITS_MAX_TIMEOUT", "2s"),
        ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "3"),
        ("CODELIA_LIMITS_MAX_MEMORY", "4 MiB"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "0.5"),
        ("CODELIA_LIMITS_MAX_CPUS", "6.5"),
        ("CODELIA_LIMITS_PIDS", "7"),
        ("CODELIA_LIMITS_MAX_PIDS", "8"),
        ("CODELIA_LIMITS_OPEN_FILES", "9"),
        ("CODELIA_LIMITS_MAX_OPEN_FILES", "10"),
        ("CODELIA_LIMITS_OUTPUT_SIZE", "11 MiB"),
        ("CODELIA_LIMITS_MAX_OUTPUT_SIZE", "12 MiB"),
        ("CODELIA_LIMITS_CPU_TIME", "13s"),
        ("CODELIA_LIMITS_MAX_CPU_TIME", "14s"),
        ("CODELIA_LIMITS_FILE_SIZE", "15 MiB"),
        ("CODELIA_LIMITS_MAX_FILE_SIZE", "16 MiB"),
        ("CODELIA_LIMITS_TMP_SIZE", "17 MiB"),
        ("CODELIA_LIMITS_MAX_TMP_SIZE", "18 MiB"),
        ("CODELIA_LIMITS_DISK_SIZE", "19 MiB"),
        ("CODELIA_LIMITS_MAX_DISK_SIZE", "20 MiB"),
        ("CODELIA_LIMITS_INODES", "21"),
        ("CODELIA_LIMITS_MAX_INODES", "22"),
    ]);
    let RunLimits { defaults, ceilings, timeouts } = limits.limits;
    let of = |limits: &Limits| {
        let mib = [
            limits.memory_bytes,
            limits.output_bytes,
            limits.file_bytes,
            limits.tmp_bytes,
            limits.disk_bytes,
        ];
        let times = [limits.timeout, limits.cpu_time].map(|time| time.as_secs());
        let counts = [limits.cpu_millicores, limits.pids, limits.open_files, limits.inodes];
        (times, mib.map(|bytes| bytes / MIB), counts)
    };
    assert_eq!(of(&defaults), ([1, 13], [3, 11, 15, 17, 19], [500, 7, 9, 21]));
    assert_eq!(of(&ceilings.0), ([2, 14], [4, 12, 16, 18, 20], [6500, 8, 10, 22]));
    assert_eq!(timeouts.detached, Duration::from_secs(2), "within the maximum");
}

#[test]
fn maximum_below_default_is_refused() {
    let refused = api_error(&[("CODELIA_LIMITS_MAX_PIDS", "99")]);
    assert_eq!(refused, "limits.max_pids: 99 is below the default 100; change one");
}

#[test]
fn approval_timeout_is_bounded() {
    for value in ["10ms", "25h"] {
        let error = refused(&[("CODELIA_APPROVALS_TIMEOUT", value)]);
        assert!(error.contains("approvals.timeout: must be 1s to 24h"), "{error}");
    }
    let api = api_of(&[("CODELIA_APPROVALS_TIMEOUT", "24h")]);
    assert_eq!(api.limits.timeouts.approval, Duration::from_secs(24 * 3600));
}

#[test]
fn sample_ratio_is_a_share() {
    for (ratio, is_valid) in
        [("0", true), ("0.25", true), ("1", true), ("1.1", false), ("-1", false), ("NaN", false)]
    {
        let loaded = loaded(None, &[], &[("CODELIA_OTLP_SAMPLE_RATIO", ratio)]);
        assert_eq!(loaded.is_ok(), is_valid, "{ratio}");
    }
}

#[test]
fn unspecified_address_becomes_loopback() {
    let config = config(&[]);
    assert_eq!(endpoint(&config, "0.0.0.0:9".parse().unwrap()), "http://127.0.0.1:9");
    assert_eq!(endpoint(&config, "[::]:9".parse().unwrap()), "http://[::1]:9");
    assert_eq!(endpoint(&config, "10.0.0.1:9".parse().unwrap()), "http://10.0.0.1:9");
}

#[test]
fn retention_is_configured() {
    let hours = |hours: u64| Duration::from_secs(hours * 3600);
    assert_eq!(api_of(&[]).retention, Retention::default());
    let variables = [
        ("CODELIA_RETENTION_RUNS", "2h"),
        ("CODELIA_RETENTION_OUTPUT", "1h"),
        ("CODELIA_RETENTION_AUDIT", "1d"),
    ];
    let expected = Retention { runs: hours(2), output: hours(1), audit: hours(24) };
    assert_eq!(worker_of(&variables).unwrap().retention, expected);
}

#[test]
fn impossible_retention_is_refused_by_key() {
    for (variable, value, key) in [
        ("CODELIA_RETENTION_RUNS", "10s", "retention.runs"),
        ("CODELIA_RETENTION_OUTPUT", "2d", "retention.output"),
        ("CODELIA_RETENTION_AUDIT", "59s", "retention.audit"),
    ] {
        for error in [
            api_error(&[(variable, value)]),
            worker_of(&[(variable, value)]).unwrap_err().to_string(),
        ] {
            assert!(error.starts_with(key), "{error}");
        }
    }
    let error = refused(&[("CODELIA_RETENTION_RUNS", "long")]);
    assert!(error.contains("retention.runs"), "{error}");
}

#[test]
fn secret_key_must_be_private_and_well_formed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    let load = || config(&[("CODELIA_SECRETS_KEY_FILE", path.to_str().unwrap())]).secrets.key();
    assert!(config(&[]).secrets.key().unwrap().is_none());
    assert!(load().unwrap_err().to_string().contains("secrets.key_file"));
    fs::write(&path, SecretKey::generate().unwrap()).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    assert!(load().unwrap_err().to_string().contains("chmod"));
    fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    assert!(load().unwrap().is_some());
    fs::write(&path, "short").unwrap();
    assert!(load().unwrap_err().to_string().contains("openssl rand"));
}

#[test]
fn incomplete_tls_configuration_is_refused() {
    assert!(api_error(&[("CODELIA_API_TLS_CERT", "/cert.pem")]).contains("api.tls_key"));
    let error = worker_of(&[("CODELIA_INTERNAL_TLS_CA", "/ca.pem")]).unwrap_err().to_string();
    assert!(error.contains("internal.tls_ca"), "{error}");
}

#[test]
fn plaintext_for_other_machines_is_refused_in_prod() {
    let prod = ("CODELIA_PROFILE", "prod");
    let open = ("CODELIA_API_LISTEN", "0.0.0.0:7300");
    let error = api_error(&[prod, open]);
    for named in ["api.listen", "api.tls_cert", "api.allow_plaintext", "codelia certs dev"] {
        assert!(error.contains(named), "{named}: {error}");
    }
    let certificate = [("CODELIA_API_TLS_CERT", "/cert.pem"), ("CODELIA_API_TLS_KEY", "/key.pem")];
    for allowed in [
        &[prod][..],
        &[prod, ("CODELIA_API_LISTEN", "[::1]:7300")],
        &[open],
        &[prod, open, ("CODELIA_API_ALLOW_PLAINTEXT", "true")],
        &[prod, open, certificate[0], certificate[1]],
    ] {
        assert!(api(&config(allowed), Mode::Bwrap).is_ok(), "{allowed:?}");
    }
}

#[test]
fn worker_keys_set_the_options() {
    let options = worker_of(&[]).unwrap();
    assert_eq!(
        (options.id.as_str(), options.listen.to_string().as_str()),
        ("w", "unix:/run/w.sock")
    );
    assert_eq!(options.worker.file_call_timeout, Duration::from_secs(60));
    let options = worker_of(&[
        ("CODELIA_WORKER_ID", "w-7"),
        ("CODELIA_WORKER_LISTEN", "0.0.0.0:7400"),
        ("CODELIA_WORKER_FILE_CALL_TIMEOUT", "7s"),
    ])
    .unwrap();
    assert_eq!((options.id.as_str(), options.listen.to_string().as_str()), ("w-7", "0.0.0.0:7400"));
    assert_eq!(options.worker.file_call_timeout, Duration::from_secs(7));
    for (variable, value, key) in [
        ("CODELIA_WORKER_ID", "Not An Id", "worker.id"),
        ("CODELIA_WORKER_LISTEN", "somewhere", "worker.listen"),
        ("CODELIA_LOG_FORMAT", "xml", "log.format"),
        ("CODELIA_API_PLACEMENT", "anywhere", "api.placement"),
        ("CODELIA_API_CORS_ORIGINS", "example.com", "api.cors_origins"),
        ("CODELIA_ESCAPE_HIGH", "shout", "escape.high"),
    ] {
        let error = refused(&[(variable, value)]);
        assert!(error.contains(key) && error.contains(&format!("env:{variable}")), "{error}");
    }
}
