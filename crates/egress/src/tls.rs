//! TLS of hosts with credentials, which is terminated: the authority that signs for them
//! towards programs, and the roots that verify them.

use std::{fs, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::{authority::Authority, config::Options, error::SetupError};

/// The authority, and the configuration of connections to those hosts.
#[derive(Debug)]
pub(crate) struct Tls {
    pub(crate) authority: Authority,
    pub(crate) client: Arc<ClientConfig>,
}

impl Tls {
    /// Reads the authority and the roots.
    pub(crate) fn new(options: &Options) -> Result<Self, SetupError> {
        let files = options.authority().ok_or(SetupError::NoAuthority)?;
        Ok(Self { authority: Authority::load(&files)?, client: client_config(roots(options)?)? })
    }
}

/// The system's authorities and the configured ones. Those that cannot be read are left out, which
/// fails connections at most.
fn roots(options: &Options) -> Result<RootCertStore, SetupError> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(system.certs);
    if let Some(path) = &options.extra_roots_file {
        let text = fs::read_to_string(path).map_err(SetupError::read(path))?;
        let certificates: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(text.as_bytes()).collect();
        let certificates = certificates.ok().filter(|found| !found.is_empty());
        for certificate in certificates.ok_or_else(|| SetupError::Roots(path.clone()))? {
            roots.add(certificate)?;
        }
    }
    Ok(roots)
}

/// The configuration of connections to hosts with credentials.
fn client_config(roots: RootCertStore) -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
