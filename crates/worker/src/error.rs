//! Why a worker cannot start, or stopped.

use codelia_server::TlsError;
use codelia_telemetry::task::CriticalTaskEnded;
use codelia_types::{Mode, option::InvalidOption};

use crate::{disk::DiskError, egress::TrustError, workspace::root::RootError};

/// Why a worker cannot start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] codelia_store::Error),
    /// The session root cannot be used.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The chosen mechanism of disk limits does not work.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// No backend passed its probe.
    #[error("no sandbox mode is usable on this host (run `codelia doctor` to see why)")]
    NoMode,
    /// The configured mode did not pass its probe.
    #[error("sandbox.mode: {mode} is not usable on this host: {problem}")]
    Mode {
        /// The mode.
        mode: Mode,
        /// The part of the host that is missing, and how to get it.
        problem: String,
    },
    /// An option does not fit the others.
    #[error(transparent)]
    Option(#[from] InvalidOption),
    /// TCP needs certificates.
    #[error(
        "worker.listen: TCP needs TLS certificates: set internal.tls_ca, internal.tls_cert and \
         internal.tls_key (`codelia certs dev` creates some)"
    )]
    TlsMissing,
    /// The certificates cannot be used.
    #[error("cannot use the TLS certificates of the internal channel")]
    Tls(#[source] TlsError),
    /// The address cannot be used.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A loop of the worker ended.
    #[error(transparent)]
    CriticalTask(#[from] CriticalTaskEnded),
    /// A thread of the worker cannot be started.
    #[error("cannot start a thread of the worker")]
    Thread(#[source] std::io::Error),
    /// The trust store of sandboxes whose requests get credentials could not be created.
    #[error("cannot create the certificate authority (egress.ca_dir)")]
    Trust(#[from] TrustError),
    /// Canary files cannot be watched.
    #[error(
        "cannot watch canary files; switch escape.canary_files off, or raise fs.inotify.max_user_instances"
    )]
    Canaries(#[source] std::io::Error),
    /// A task panicked or ended early.
    #[error("the task {0:?} stopped unexpectedly")]
    Stopped(&'static str),
}
