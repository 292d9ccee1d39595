//! Certificates from files: read at the start, and again when the files change.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use codelia_telemetry::metrics;
use codelia_types::option::InvalidOption;
use tokio::time::sleep;
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, CertificateError, RootCertStore, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
        server::{VerifierBuilderError, WebPkiClientVerifier},
    },
};

/// How often the files are read.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);
/// Larger than a file with every authority of a system.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The files of a certificate, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by those between it and its authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities of the other side, for mutual TLS.
    pub ca: Option<PathBuf>,
}

codelia_types::options! {
    /// Mutual TLS between apis and workers: the section `internal` of the configuration.
    pub struct InternalTls {
        /// Authorities that sign the certificates of apis and workers; several may be in the file.
        /// Default: Unix sockets only.
        pub tls_ca: Option<PathBuf> = None,
        /// Certificate of this api or worker. Default: Unix sockets only.
        pub tls_cert: Option<PathBuf> = None,
        /// Key of the certificate. Default: Unix sockets only.
        pub tls_key: Option<PathBuf> = None,
    }
}

impl InternalTls {
    /// The files; `None` if mutual TLS is off.
    ///
    /// # Errors
    /// If one is missing.
    pub fn files(self) -> Result<Option<TlsFiles>, InvalidOption> {
        match (self.tls_ca, self.tls_cert, self.tls_key) {
            (None, None, None) => Ok(None),
            (ca @ Some(_), Some(cert), Some(key)) => Ok(Some(TlsFiles { cert, key, ca })),
            _ => Err(InvalidOption::new(
                "internal.tls_ca, internal.tls_cert and internal.tls_key",
                "set all of them, or none",
            )),
        }
    }
}

/// Why a certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file is not PEM, or incomplete.
    #[error("{} is not complete PEM", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: pem::Error,
    },
    /// The certificate and the key cannot be used together.
    #[error("unusable certificate {} or key {}", files.cert.display(), files.key.display())]
    Certificate {
        /// The files.
        files: Box<TlsFiles>,
        /// What is wrong.
        source: rustls::Error,
    },
    /// A certificate in the file of authorities cannot be used.
    #[error("unusable certificate authority in {}", path.display())]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
    /// The file of authorities has none.
    #[error("no usable certificate authority in {}", path.display())]
    NoAuthority {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: VerifierBuilderError,
    },
}

/// The contents of [`TlsFiles`].
#[derive(PartialEq, Eq)]
pub struct TlsPem {
    /// The certificate chain.
    pub cert: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
    /// The authorities of the other side, for mutual TLS.
    pub ca: Option<Vec<u8>>,
}

// Keys must not reach a log.
impl fmt::Debug for TlsPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsPem").finish_non_exhaustive()
    }
}

/// What new connections use.
#[derive(Debug, Clone)]
struct Usable {
    pem: Arc<TlsPem>,
    server: Arc<ServerConfig>,
    /// When the first certificate of the chain ends, in seconds since 1970.
    expires_at: i64,
}

/// A certificate that follows its files. Connections keep the one that they began with.
#[derive(Debug)]
pub struct TlsIdentity {
    files: TlsFiles,
    usable: Mutex<Usable>,
    /// Why the files cannot be used, if they cannot. The identity is the one before, then.
    failure: Mutex<Option<String>>,
}

impl TlsIdentity {
    /// Reads the files.
    ///
    /// # Errors
    /// If a file is unreadable, or they cannot be used together.
    pub fn load(files: TlsFiles) -> Result<Arc<Self>, TlsError> {
        let usable = files.usable(files.read()?)?;
        metrics().certificate_expires(files.label(), usable.expires_at);
        Ok(Arc::new(Self { files, usable: usable.into(), failure: Mutex::default() }))
    }

    /// The contents that new connections use. Another pointer means other contents.
    #[must_use]
    pub fn pem(&self) -> Arc<TlsPem> {
        lock(&self.usable).pem.clone()
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        lock(&self.usable).server.clone().into()
    }

    /// Reads the files again every few seconds. Does not end.
    pub async fn follow(self: Arc<Self>) {
        loop {
            sleep(RELOAD_INTERVAL).await;
            let identity = self.clone();
            // The file system may be slow.
            if let Err(error) = tokio::task::spawn_blocking(move || identity.reload()).await {
                tracing::error!(%error, "reading certificates failed");
            }
        }
    }

    /// Uses the files if they changed. Keeps what it has if they cannot be used.
    fn reload(&self) {
        let changed = self.files.read().and_then(|pem| {
            let is_same = pem == *self.pem();
            if is_same { Ok(None) } else { self.files.usable(pem).map(Some) }
        });
        let mut failure = lock(&self.failure);
        match changed {
            Ok(None) => *failure = None,
            Ok(Some(usable)) => {
                let file = self.files.cert.display();
                tracing::info!(%file, expires_at = usable.expires_at, "certificate reloaded");
                metrics().certificate_expires(self.files.label(), usable.expires_at);
                *lock(&self.usable) = usable;
                *failure = None;
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                let text = format!(
                    "{error}: {}",
                    error.source().map(ToString::to_string).unwrap_or_default()
                );
                // Once, not at every attempt.
                if failure.as_ref() != Some(&text) {
                    tracing::warn!(
                        error,
                        "certificate files changed and cannot be used, keeping the old ones"
                    );
                    metrics().certificate_reload_failed(self.files.label());
                    *failure = Some(text);
                }
            }
        }
    }
}

impl TlsFiles {
    /// The label of metrics: only connections between our own parts use mutual TLS.
    fn label(&self) -> &'static str {
        if self.ca.is_some() { "internal" } else { "public" }
    }

    fn read(&self) -> Result<TlsPem, TlsError> {
        let ca = self.ca.as_deref().map(read).transpose()?;
        Ok(TlsPem { cert: read(&self.cert)?, key: read(&self.key)?, ca })
    }

    fn usable(&self, pem: TlsPem) -> Result<Usable, TlsError> {
        let unusable = |source| TlsError::Certificate { files: Box::new(self.clone()), source };
        let chain = certificates(&pem.cert, &self.cert)?;
        let expires_at = expires_at(&chain).map_err(unusable)?;
        let key = PrivateKeyDer::from_pem_slice(&pem.key)
            .map_err(|source| TlsError::Pem { path: self.key.clone(), source })?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?;
        let builder = match (&self.ca, &pem.ca) {
            (Some(path), Some(ca)) => {
                let roots = Arc::new(authorities(ca, path)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider)
                    .build()
                    .map_err(|source| TlsError::NoAuthority { path: path.clone(), source })?;
                builder.with_client_cert_verifier(verifier)
            }
            _ => builder.with_no_client_auth(),
        };
        let mut server = builder.with_single_cert(chain, key).map_err(unusable)?;
        server.alpn_protocols = vec![b"h2".to_vec()];
        if self.ca.is_none() {
            server.alpn_protocols.push(b"http/1.1".to_vec());
        }
        Ok(Usable { pem: Arc::new(pem), server: Arc::new(server), expires_at })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, "larger than 1 MiB")));
    }
    Ok(bytes)
}

fn certificates(pem: &[u8], path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|source| TlsError::Pem { path: path.to_owned(), source })
}

fn authorities(pem: &[u8], path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(pem, path)? {
        roots
            .add(authority)
            .map_err(|source| TlsError::Authority { path: path.to_owned(), source })?;
    }
    Ok(roots)
}

/// When the first certificate of a chain ends. Clients refuse the chain then.
fn expires_at(chain: &[CertificateDer<'_>]) -> Result<i64, rustls::Error> {
    let mut first = i64::MAX;
    for certificate in chain {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|_| rustls::Error::from(CertificateError::BadEncoding))?;
        first = first.min(parsed.validity().not_after.timestamp());
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use rcgen::{CertificateParams, KeyPair};
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio_rustls::{
        TlsConnector, client,
        rustls::{ClientConfig, pki_types::ServerName},
        server,
    };

    use super::*;

    #[test]
    fn internal_tls_needs_all_files() {
        let half = InternalTls { tls_ca: Some("/ca.pem".into()), ..InternalTls::default() };
        assert!(half.files().unwrap_err().key.contains("internal.tls_key"));
        assert_eq!(InternalTls::default().files(), Ok(None));
    }

    /// Writes a new certificate, which is its own authority, and returns its files.
    fn issue(dir: &Path, mutual: bool) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["localhost".to_owned()])
            .unwrap()
            .self_signed(&key)
            .unwrap();
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("cert"), certificate.pem()).unwrap();
        fs::write(dir.join("key"), key.serialize_pem()).unwrap();
        files(dir, mutual)
    }

    fn files(dir: &Path, mutual: bool) -> TlsFiles {
        TlsFiles {
            cert: dir.join("cert"),
            key: dir.join("key"),
            ca: mutual.then(|| dir.join("cert")),
        }
    }

    type Pair = (client::TlsStream<DuplexStream>, server::TlsStream<DuplexStream>);

    /// A real handshake with a client that trusts what `trusted` holds.
    async fn handshake(identity: &TlsIdentity, trusted: &[u8]) -> io::Result<Pair> {
        let roots = authorities(trusted, Path::new("trusted")).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (near, far) = duplex(16 * 1024);
        let name = ServerName::try_from("localhost").unwrap();
        let connect = TlsConnector::from(Arc::new(config)).connect(name, near);
        let (near, far) = tokio::join!(connect, identity.acceptor().accept(far));
        Ok((near?, far?))
    }

    async fn echo((near, far): &mut Pair) {
        near.write_all(b"x").await.unwrap();
        near.flush().await.unwrap();
        assert_eq!(far.read_u8().await.unwrap(), b'x');
    }

    #[tokio::test]
    async fn replaced_certificate_serves_new_connections_only() {
        let dir = TempDir::new().unwrap();
        let identity = TlsIdentity::load(issue(dir.path(), false)).unwrap();
        let old = fs::read(dir.path().join("cert")).unwrap();
        let mut open = handshake(&identity, &old).await.unwrap();

        issue(&dir.path().join("next"), false);
        for name in ["cert", "key"] {
            fs::rename(dir.path().join("next").join(name), dir.path().join(name)).unwrap();
        }
        let new = fs::read(dir.path().join("cert")).unwrap();
        assert!(
            handshake(&identity, &new).await.is_err(),
            "the control: it does not change by itself"
        );
        let before = identity.pem();
        identity.reload();
        assert!(!Arc::ptr_eq(&before, &identity.pem()));
        handshake(&identity, &new).await.unwrap();
        assert!(handshake(&identity, &old).await.is_err());
        echo(&mut open).await;

        let same = identity.pem();
        identity.reload();
        assert!(Arc::ptr_eq(&same, &identity.pem()), "unchanged files change nothing");
    }

    #[tokio::test]
    async fn swapped_symlink_is_followed() {
        let dir = TempDir::new().unwrap();
        issue(&dir.path().join("1"), false);
        issue(&dir.path().join("2"), false);
        // As Kubernetes does: files below a link that is replaced.
        let data = dir.path().join("data");
        symlink("1", &data).unwrap();
        let identity = TlsIdentity::load(files(&data, false)).unwrap();
        symlink("2", dir.path().join("next")).unwrap();
        fs::rename(dir.path().join("next"), &data).unwrap();
        identity.reload();
        handshake(&identity, &fs::read(dir.path().join("2/cert")).unwrap()).await.unwrap();
    }

    #[tokio::test]
    async fn unusable_files_keep_the_old_certificate() {
        let dir = TempDir::new().unwrap();
        let identity = TlsIdentity::load(issue(dir.path(), true)).unwrap();
        let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
        let (cert, key, before) = (read("cert"), read("key"), identity.pem());
        let other = TempDir::new().unwrap();
        issue(other.path(), true);
        let other_key = fs::read(other.path().join("key")).unwrap();
        let large = vec![b'-'; usize::try_from(MAX_FILE_BYTES).unwrap() + 1];
        for (name, content) in [
            ("cert", &cert[..cert.len() / 2]),
            ("cert", &[]),
            ("cert", &large),
            ("key", &key[..key.len() / 2]),
            ("key", &[]),
            ("key", &other_key),
        ] {
            fs::write(dir.path().join(name), content).unwrap();
            identity.reload();
            assert!(Arc::ptr_eq(&before, &identity.pem()), "{name}");
            let failure = lock(&identity.failure).clone().unwrap();
            assert!(failure.contains(&dir.path().join(name).display().to_string()), "{failure}");
            fs::write(dir.path().join("cert"), &cert).unwrap();
            fs::write(dir.path().join("key"), &key).unwrap();
            identity.reload();
            assert_eq!(*lock(&identity.failure), None);
        }
        fs::remove_file(dir.path().join("key")).unwrap();
        identity.reload();
        assert!(lock(&identity.failure).is_some() && Arc::ptr_eq(&before, &identity.pem()));
    }
}
