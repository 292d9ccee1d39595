//! Why the proxy cannot be set up.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::resolver::RESOLV_CONF;

/// The proxy or its certificate authority cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file of the certificate authority cannot be read or written.
    #[error("cannot use {path}")]
    Authority {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file with secrets can be read by others.
    #[error("{0} can be read by other users: run chmod 600")]
    Mode(PathBuf),
    /// One of the files of the authority exists without the other.
    #[error("{0} is missing: restore it, or remove the other file of the authority for a new one")]
    Half(PathBuf),
    /// The certificate or key of the authority is not valid.
    #[error("cannot use the certificate authority")]
    Certificate(#[from] rcgen::Error),
    /// The certificate and the key of the authority do not fit.
    #[error("cannot use the certificate authority for TLS")]
    AuthorityTls(#[source] rustls::Error),
    /// The text of the credentials file is not valid. Says where, never what.
    #[error("{0} is not a valid credentials file")]
    Credentials(PathBuf),
    /// An entry of the credentials file is not valid.
    #[error("credential {name:?}: {problem}")]
    Credential {
        /// The name of the entry.
        name: String,
        /// The part of the entry to correct.
        problem: &'static str,
    },
    /// No DNS server is configured.
    #[error("no DNS server: set the proxy's resolvers or name one in {RESOLV_CONF}")]
    NoResolver,
    /// Hosts have credentials, but their TLS cannot be terminated.
    #[error("credentials need a certificate authority: set its files")]
    NoAuthority,
    /// A file has no certificate.
    #[error("{0} has no valid certificate")]
    Roots(PathBuf),
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
}

impl SetupError {
    /// Wraps the error of reading a file, for `map_err`.
    pub(crate) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Read { path, source }
    }

    /// Wraps the error of a file of the certificate authority, for `map_err`.
    pub(crate) fn authority(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Authority { path, source }
    }
}
