//! Why the proxy cannot be set up.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{authority::AuthorityError, credentials::CredentialsError, resolver::RESOLV_CONF};

/// The proxy cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No DNS server is configured.
    #[error("no DNS server: set the proxy's resolvers or name one in {RESOLV_CONF}")]
    NoResolver,
    /// Hosts have credentials, but their TLS cannot be terminated.
    #[error("credentials need a certificate authority: set its files")]
    NoAuthority,
    /// The credentials cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The certificate authority cannot be used.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
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
}
