//! The settings of a worker.

use std::{
    fmt,
    net::SocketAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::PathBuf,
    str::FromStr,
    thread::available_parallelism,
    time::Duration,
};

use codelia_backends::CgroupParent;
use codelia_policy::EscapeOptions;
use codelia_server::{Limits, TlsFiles, within_share};
use codelia_store::{Retention, SecretKey};
use codelia_types::{
    ByteSize, Mode, WorkerId, duration,
    option::{InvalidOption, optional_text, text},
    optional_duration,
};

use crate::{disk::DiskChoice, workspace::uid_range::UidRange};

const SLOTS_PER_CORE: usize = 4;
/// How long calls and runs may take to end at shutdown, unless it is configured.
const DRAIN_GRACE: Duration = Duration::from_secs(30);
/// The part of the open files that connections may use: the rest is for sandboxes and the database.
const CONNECTION_SHARE: u64 = 8;
/// The windows of a connection. Clients are our own apis: small for a call, so that one that stalls
/// does not hold back the others.
const STREAM_WINDOW: ByteSize = ByteSize::kib(256);
const CONNECTION_WINDOW: ByteSize = ByteSize::mib(64);

/// The settings that a worker is started with.
#[derive(Debug, Clone)]
pub struct Options {
    /// Stays the same over restarts.
    pub id: WorkerId,
    /// The directory that holds session directories.
    pub root: PathBuf,
    /// Where the worker listens for apis.
    pub listen: Listen,
    /// Required by [`Listen::Tcp`].
    pub internal_tls: Option<TlsFiles>,
    /// The operator's settings for workers.
    pub worker: WorkerOptions,
    /// From the signal that asks a command to end to the one that kills it.
    pub kill_grace: Duration,
    /// The response to a command that tries to leave its sandbox.
    pub escape: EscapeOptions,
    /// How long rows are kept, unless their tenant has a retention of its own.
    pub retention: Retention,
    /// A mode that must be usable: without it the worker does not start.
    pub required_mode: Option<Mode>,
    /// Gives each session its own user and group, if the worker may change the owner of files.
    pub uids: Option<UidRange>,
    /// Decrypts secret variables; without it, the worker refuses runs that have some.
    pub secret_key: Option<SecretKey>,
    /// How many files the process may open.
    pub open_files: u64,
    /// The egress proxy of runs with network mode `proxy`.
    pub egress: codelia_egress::Options,
    /// A read that waits for a decision is denied after this time.
    pub read_timeout: Duration,
    /// Where control groups are created.
    pub cgroup_parent: CgroupParent,
}

codelia_types::options! {
    /// A worker: the section `worker` of the configuration.
    pub struct WorkerOptions {
        /// Name of this worker, the same after a restart. Default: the host name.
        pub id: Option<WorkerId> = None,
        /// Where it listens for apis: `IP:PORT` or `unix:/PATH`. Default: a Unix socket in
        /// `DATA_DIR`.
        #[serde(with = "optional_text")]
        pub listen: Option<Listen> = None,
        /// Address that apis use. Default: the address it listens on.
        pub advertise: Option<String> = None,
        /// Connections of apis; at most an eighth of the open files.
        pub max_connections: NonZeroUsize = const { NonZeroUsize::new(256).unwrap() },
        /// Calls of one api at the same time.
        pub max_streams_per_connection: NonZeroU32 = const { NonZeroU32::new(16384).unwrap() },
        /// As for the api.
        #[serde(with = "duration")]
        pub first_request_timeout: Duration = Duration::from_secs(10),
        /// As for the api, which connects again when it needs to.
        #[serde(with = "duration")]
        pub idle_timeout: Duration = Duration::from_secs(600),
        /// As for the api.
        #[serde(with = "duration")]
        pub keepalive_interval: Duration = Duration::from_secs(5),
        /// An api that does not answer for so long is dead; its `Exec` runs end.
        #[serde(with = "duration")]
        pub keepalive_timeout: Duration = Duration::from_secs(10),
        /// Runs at the same time. Default: 4 per core.
        pub slots: Option<NonZeroUsize> = None,
        /// How long leases live without a heartbeat.
        #[serde(with = "duration")]
        pub lease_ttl: Duration = Duration::from_secs(15),
        /// How long before the end of a lease the worker kills its sandboxes, in percent of its
        /// time; at most 50.
        pub lease_margin_percent: u32 = 20,
        /// How often the worker looks in the database for runs that were not pushed.
        #[serde(with = "duration")]
        pub poll_interval: Duration = Duration::from_millis(500),
        /// How long calls and runs may take to end at shutdown. Default: 30s; 2s for `up`.
        #[serde(with = "optional_duration")]
        pub drain_grace: Option<Duration> = None,
        /// How long a file call may work. Reads and writes of content end by their own limits.
        #[serde(with = "duration")]
        pub file_call_timeout: Duration = Duration::from_secs(60),
        /// With less free for sessions, the worker takes no new ones and starts no runs. Default: 1
        /// GiB; at most a tenth of the file system.
        pub disk_reserve: Option<ByteSize> = None,
        /// With less free memory on the host, the worker discards prepared sandboxes.
        pub min_free_memory: ByteSize = ByteSize::mib(256),
        /// What limits the disk space of sessions: `auto`, `project_quota`, `user_quota`, `image`
        /// or `scan` ([disk](operations/disk.md#disk-mechanisms)).
        #[serde(with = "text")]
        pub disk: DiskChoice = DiskChoice::Auto,
    }
}

impl WorkerOptions {
    /// How many runs are executed concurrently.
    #[must_use]
    pub fn slots(&self) -> usize {
        let by_cores = || SLOTS_PER_CORE * available_parallelism().map_or(1, NonZeroUsize::get);
        self.slots.map_or_else(by_cores, NonZeroUsize::get)
    }

    /// How long running runs may continue when the worker shuts down.
    #[must_use]
    pub fn drain_grace(&self) -> Duration {
        self.drain_grace.unwrap_or(DRAIN_GRACE)
    }

    /// How long before the end of a lease that it cannot renew the worker kills its sandboxes.
    pub(crate) fn lease_margin(&self) -> Duration {
        self.lease_ttl * self.lease_margin_percent / 100
    }

    /// Limits of connections, within the open files of this process.
    #[must_use]
    pub fn connections(&self, open_files: u64) -> Limits {
        let max_connections = within_share(
            "worker.max_connections",
            self.max_connections,
            open_files / CONNECTION_SHARE,
        );
        Limits {
            max_connections,
            max_connections_per_address: max_connections,
            first_request_timeout: self.first_request_timeout,
            idle_timeout: self.idle_timeout,
            keepalive_interval: self.keepalive_interval,
            keepalive_timeout: self.keepalive_timeout,
            max_streams_per_connection: self.max_streams_per_connection.get(),
            stream_window: STREAM_WINDOW,
            connection_window: CONNECTION_WINDOW,
        }
    }

    /// Refuses a margin that no lease can have: the worker renews after a third of the time to
    /// live, and may have to retry.
    pub(crate) fn check(&self) -> Result<(), InvalidOption> {
        if (1..=50).contains(&self.lease_margin_percent) {
            return Ok(());
        }
        Err(InvalidOption::new("worker.lease_margin_percent", "must be from 1 to 50"))
    }
}

/// Where a worker listens for apis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket, for the same user on the same machine.
    Unix(PathBuf),
    /// TCP; requires [`Options::internal_tls`].
    Tcp(SocketAddr),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some(path) if path.starts_with('/') => Ok(Self::Unix(path.into())),
            Some(_) => Err(format!("the path in {text:?} is not absolute")),
            None => {
                let invalid = |_| format!("{text:?} is neither IP:PORT nor unix:/PATH");
                text.parse().map(Self::Tcp).map_err(invalid)
            }
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_listens_on_socket_or_address() {
        for text in ["unix:/run/w.sock", "0.0.0.0:7400"] {
            assert_eq!(text.parse::<Listen>().unwrap().to_string(), text);
        }
        for wrong in ["unix:w.sock", "somewhere"] {
            assert!(wrong.parse::<Listen>().is_err(), "{wrong}");
        }
    }
}
