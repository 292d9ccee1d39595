//! The installation's certificate authority, which signs certificates for hosts with credentials.

use std::{
    collections::HashMap,
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
};
use time::OffsetDateTime;

use crate::{config, error::SetupError};

/// How long the authority is valid.
const AUTHORITY_DAYS: i64 = 3650;
/// How long the certificate of a host is valid, and when it is replaced.
const HOST_DAYS: i64 = 7;
const HOST_MAX_AGE: Duration = Duration::from_secs(24 * 3600);

/// Creates the files of the authority if both are missing. The key is readable by its owner only.
///
/// # Errors
/// A file cannot be written, or only one of them exists.
pub fn ensure_authority(files: &config::Authority) -> Result<(), SetupError> {
    match (files.certificate_file.exists(), files.key_file.exists()) {
        (true, true) => return Ok(()),
        (true, false) => return Err(SetupError::Half(files.key_file.clone())),
        (false, true) => return Err(SetupError::Half(files.certificate_file.clone())),
        (false, false) => {}
    }
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, "Codelia egress");
    set_validity(&mut params, AUTHORITY_DAYS);
    let certificate = params.self_signed(&key)?;
    write_new(&files.key_file, &key.serialize_pem(), 0o600)?;
    write_new(&files.certificate_file, &certificate.pem(), 0o644)
}

fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), SetupError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written =
        file.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
    written.map_err(SetupError::authority(path))
}

fn set_validity(params: &mut CertificateParams, days: i64) {
    let now = OffsetDateTime::now_utc();
    // Clocks of programs may be behind.
    params.not_before = now - time::Duration::days(1);
    params.not_after = now + time::Duration::days(days);
}

/// Signs certificates of hosts.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    /// The key of all hosts' certificates.
    host_key: KeyPair,
    /// Bounded by the number of credentials.
    hosts: Mutex<HashMap<String, (Instant, Arc<ServerConfig>)>>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// Reads the authority, which is created if it does not exist.
    pub(crate) fn load(files: &config::Authority) -> Result<Self, SetupError> {
        ensure_authority(files)?;
        let key_failed = || SetupError::authority(&files.key_file);
        if fs::metadata(&files.key_file).map_err(key_failed())?.mode() & 0o077 != 0 {
            return Err(SetupError::Mode(files.key_file.clone()));
        }
        let key = fs::read_to_string(&files.key_file).map_err(key_failed())?;
        let pem = fs::read_to_string(&files.certificate_file)
            .map_err(SetupError::authority(&files.certificate_file))?;
        let certificate = pem_certificate(&pem).ok_or(rcgen::Error::CouldNotParseCertificate)?;
        let issuer = Issuer::from_ca_cert_der(&certificate, KeyPair::from_pem(&key)?)?;
        let host_key = KeyPair::generate()?;
        Ok(Self { issuer, certificate, host_key, hosts: Mutex::default() })
    }

    /// The configuration of a TLS server for this host. It speaks HTTP/1.1 only.
    pub(crate) fn server_config(&self, host: &str) -> Result<Arc<ServerConfig>, SetupError> {
        let mut hosts = self.hosts.lock();
        if let Some((made, config)) = hosts.get(host)
            && made.elapsed() < HOST_MAX_AGE
        {
            return Ok(config.clone());
        }
        let config = Arc::new(self.new_server_config(host)?);
        hosts.insert(host.to_owned(), (Instant::now(), config.clone()));
        Ok(config)
    }

    fn new_server_config(&self, host: &str) -> Result<ServerConfig, SetupError> {
        let mut params = CertificateParams::new(vec![host.to_owned()])?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, HOST_DAYS);
        let certificate = params.signed_by(&self.host_key, &self.issuer)?;
        let chain = vec![certificate.der().clone(), self.certificate.clone()];
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.host_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(SetupError::AuthorityTls)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(SetupError::AuthorityTls)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn pem_certificate(pem: &str) -> Option<CertificateDer<'static>> {
    use rustls::pki_types::pem::PemObject;
    CertificateDer::from_pem_slice(pem.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authority_is_created_once_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let files = config::Authority {
            certificate_file: dir.path().join("ca.pem"),
            key_file: dir.path().join("ca.key"),
        };
        ensure_authority(&files).unwrap();
        assert_eq!(fs::metadata(&files.key_file).unwrap().mode() & 0o777, 0o600);
        let first = fs::read(&files.certificate_file).unwrap();
        let authority = Authority::load(&files).unwrap();
        assert_eq!(fs::read(&files.certificate_file).unwrap(), first);
        let config = authority.server_config("a.example.com").unwrap();
        assert!(Arc::ptr_eq(&config, &authority.server_config("a.example.com").unwrap()), "cached");
        fs::remove_file(&files.key_file).unwrap();
        assert!(matches!(ensure_authority(&files), Err(SetupError::Half(_))));
    }
}
