//! A certificate authority for one test.

use std::{fs, path::Path};

use anyhow::Result;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};

/// A certificate authority.
#[derive(Debug)]
pub struct Certificates {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Certificates {
    /// Creates a new authority.
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        // Programs take a certificate whose issuer has its own name for a self-signed one.
        params.distinguished_name.push(DnType::CommonName, "test authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate()?)? })
    }

    /// Its own certificate in PEM.
    #[must_use]
    pub fn authority_pem(&self) -> String {
        self.issuer.pem()
    }

    /// Writes `{name}-ca.pem`, `{name}.pem` and `{name}.key`: a certificate for all of `names`, for
    /// either side of a connection.
    pub fn write(&self, dir: &Path, name: &str, names: &[&str]) -> Result<()> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        fs::write(dir.join(format!("{name}-ca.pem")), self.authority_pem())?;
        fs::write(dir.join(format!("{name}.pem")), certificate.pem())?;
        fs::write(dir.join(format!("{name}.key")), key.serialize_pem())?;
        Ok(())
    }
}
