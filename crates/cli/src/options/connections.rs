//! Limits of connections, and the descriptors that they share with the rest of the process.
//!
//! Connections to the API may use half of the descriptors of a process, connections to the worker an
//! eighth. The rest is for the process's own work: sandboxes, files and the database.

use std::{
    num::{NonZeroU32, NonZeroU64},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use codelia_server::Limits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Config;

/// Parts of the descriptors that connections may use.
const API_SHARE: u64 = 2;
const WORKER_SHARE: u64 = 8;
/// Fewer descriptors leave too few for the process's own work.
const MIN_OPEN_FILES: u64 = 256;
/// More descriptors help no one, and some programs look at each of them.
const MAX_OPEN_FILES: u64 = 1024 * 1024;
/// The windows of the worker, whose clients are our own apis: small for a call, so that one that
/// stalls does not hold back the others.
const WORKER_STREAM_WINDOW: u32 = 256 * 1024;
const WORKER_CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;

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
pub(super) fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Limits of the connections to the API.
pub(super) fn api(config: &Config) -> Limits {
    let api = &config.api;
    let max_connections = within_share("api.max_connections", api.max_connections.get(), API_SHARE);
    let half = max_connections.div_ceil(2);
    Limits {
        max_connections,
        max_connections_per_address: api.max_connections_per_address.map_or(half, Into::into),
        first_request_timeout: seconds(api.first_request_timeout_seconds),
        idle_timeout: seconds(api.idle_timeout_seconds),
        keepalive_interval: seconds(api.keepalive_interval_seconds),
        keepalive_timeout: seconds(api.keepalive_timeout_seconds),
        max_streams_per_connection: api.max_streams_per_connection.get(),
        stream_window: window(api.stream_window_kb),
        connection_window: window(api.connection_window_kb),
    }
}

/// Limits of the connections to the worker.
pub(super) fn worker(config: &Config) -> Limits {
    let worker = &config.worker;
    let max_connections = within_share("worker.max_connections", worker.max_connections.get(), WORKER_SHARE);
    Limits {
        max_connections,
        max_connections_per_address: max_connections,
        first_request_timeout: seconds(worker.first_request_timeout_seconds),
        idle_timeout: seconds(worker.idle_timeout_seconds),
        keepalive_interval: seconds(worker.keepalive_interval_seconds),
        keepalive_timeout: seconds(worker.keepalive_timeout_seconds),
        max_streams_per_connection: worker.max_streams_per_connection.get(),
        stream_window: WORKER_STREAM_WINDOW,
        connection_window: WORKER_CONNECTION_WINDOW,
    }
}

/// Limits of calls to the API.
pub(super) fn calls(config: &Config) -> codelia_api::CallLimits {
    let api = &config.api;
    codelia_api::CallLimits {
        max_calls_per_key: api.max_calls_per_key.get(),
        max_watches_per_key: api.max_watches_per_key.get(),
        max_request_bytes_per_key: api.max_request_mb_per_key.get().saturating_mul(1024 * 1024),
        message_timeout: seconds(api.message_timeout_seconds),
        list_reads_per_second: api.list_reads_per_second.get(),
        failed_keys_per_minute: api.failed_keys_per_minute,
    }
}

/// Limits of the connections to the metrics.
pub(crate) fn metrics(config: &Config) -> codelia_telemetry::HttpLimits {
    codelia_telemetry::HttpLimits {
        max_connections: config.metrics.max_connections.get(),
        request_timeout: seconds(config.metrics.request_timeout_seconds),
    }
}

/// The configured number of connections, or the share of the descriptors if that is less.
fn within_share(key: &'static str, configured: usize, share: u64) -> usize {
    let open_files = open_files();
    let max = usize::try_from(open_files / share).unwrap_or(usize::MAX);
    if configured > max {
        tracing::warn!(
            key,
            configured,
            lowered_to = max,
            open_files,
            "too few descriptors (raise ulimit -n)"
        );
    }
    configured.min(max)
}

fn seconds(count: NonZeroU64) -> Duration {
    Duration::from_secs(count.get())
}

/// HTTP/2 allows windows of up to 2 GiB.
fn window(kilobytes: NonZeroU32) -> u32 {
    kilobytes.get().saturating_mul(1024).min(i32::MAX.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::config;

    #[test]
    fn connection_keys_set_the_limits() {
        let limits = api(&config(&[
            ("CODELIA_API_MAX_CONNECTIONS", "7"),
            ("CODELIA_API_MAX_STREAMS_PER_CONNECTION", "8"),
            ("CODELIA_API_STREAM_WINDOW_KB", "64"),
            ("CODELIA_API_CONNECTION_WINDOW_KB", "4000000"),
            ("CODELIA_API_FIRST_REQUEST_TIMEOUT_SECONDS", "9"),
            ("CODELIA_API_IDLE_TIMEOUT_SECONDS", "10"),
            ("CODELIA_API_KEEPALIVE_INTERVAL_SECONDS", "11"),
            ("CODELIA_API_KEEPALIVE_TIMEOUT_SECONDS", "12"),
        ]));
        let expected = Limits {
            max_connections: 7,
            max_connections_per_address: 4,
            first_request_timeout: Duration::from_secs(9),
            idle_timeout: Duration::from_secs(10),
            keepalive_interval: Duration::from_secs(11),
            keepalive_timeout: Duration::from_secs(12),
            max_streams_per_connection: 8,
            stream_window: 64 * 1024,
            connection_window: 0x7fff_ffff,
        };
        assert_eq!(limits, expected);
        let per_address = config(&[("CODELIA_API_MAX_CONNECTIONS_PER_ADDRESS", "3")]);
        assert_eq!(api(&per_address).max_connections_per_address, 3);
    }

    #[test]
    fn call_keys_set_the_limits() {
        let limits = calls(&config(&[
            ("CODELIA_API_MAX_CALLS_PER_KEY", "7"),
            ("CODELIA_API_MAX_WATCHES_PER_KEY", "8"),
            ("CODELIA_API_MAX_REQUEST_MB_PER_KEY", "9"),
            ("CODELIA_API_MESSAGE_TIMEOUT_SECONDS", "10"),
            ("CODELIA_API_LIST_READS_PER_SECOND", "11"),
            ("CODELIA_API_FAILED_KEYS_PER_MINUTE", "0"),
        ]));
        let expected = codelia_api::CallLimits {
            max_calls_per_key: 7,
            max_watches_per_key: 8,
            max_request_bytes_per_key: 9 << 20,
            message_timeout: Duration::from_secs(10),
            list_reads_per_second: 11,
            failed_keys_per_minute: 0,
        };
        assert_eq!(limits, expected);
    }

    #[test]
    fn connections_leave_descriptors_for_other_work() {
        let every = config(&[
            ("CODELIA_API_MAX_CONNECTIONS", "9999999"),
            ("CODELIA_WORKER_MAX_CONNECTIONS", "9999999"),
        ]);
        let (api, worker) = (api(&every).max_connections, worker(&every).max_connections);
        let used = u64::try_from(api + worker).unwrap();
        assert!(used > 0 && used <= open_files() * 5 / 8, "{used} of {}", open_files());
    }
}
