//! Why a call to a worker failed.

use tonic::{Code, Status};

/// Why a call to a worker failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("invalid worker address {address:?}: must begin with unix: or https://")]
    Address { address: String },
    #[error("worker address {address:?} needs TLS, but no internal certificates are configured")]
    TlsNotConfigured { address: String },
    #[error("cannot open a channel to the worker")]
    Channel(#[from] tonic::transport::Error),
    #[error("worker did not answer in time")]
    TimedOut,
    #[error("worker refused the call: {}", .0.message())]
    Refused(Status),
}

impl Error {
    /// Whether the worker does not know the run (yet).
    pub(crate) fn is_unknown_run(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == Code::NotFound)
    }

    /// Whether the next call should open a new channel.
    pub(crate) fn breaks_channel(&self) -> bool {
        match self {
            Self::TimedOut | Self::Channel(_) => true,
            Self::Refused(status) => matches!(status.code(), Code::Unavailable | Code::Unknown),
            Self::Address { .. } | Self::TlsNotConfigured { .. } => false,
        }
    }
}
