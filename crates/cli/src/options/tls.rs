//! Certificates and keys of the API server and of the connections between API and workers.

use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::config::Config;

/// Certificate chain and private key, as PEM.
type Identity = (Vec<u8>, Vec<u8>);
/// A configuration key and the path it holds.
type PathKey<'a> = (&'static str, Option<&'a Path>);

/// Identity of the public API server; `None` if TLS is off.
pub(super) fn public(config: &Config) -> Result<Option<Identity>> {
    identity(("api.tls_cert", config.api.tls_cert.as_deref()), ("api.tls_key", config.api.tls_key.as_deref()))
}

/// Mutual TLS between API and workers; `None` if it is off.
pub(super) fn internal(config: &Config) -> Result<Option<codelia_worker::InternalTls>> {
    let internal = &config.internal;
    let identity = identity(
        ("internal.tls_cert", internal.tls_cert.as_deref()),
        ("internal.tls_key", internal.tls_key.as_deref()),
    )?;
    match (&internal.tls_ca, identity) {
        (None, None) => Ok(None),
        (Some(ca), Some((cert_pem, key_pem))) => {
            Ok(Some(codelia_worker::InternalTls { ca_pem: read("internal.tls_ca", ca)?, cert_pem, key_pem }))
        }
        _ => bail!("set all of internal.tls_ca, internal.tls_cert and internal.tls_key, or none"),
    }
}

fn identity(cert: PathKey<'_>, key: PathKey<'_>) -> Result<Option<Identity>> {
    match (cert.1, key.1) {
        (None, None) => Ok(None),
        (Some(cert_path), Some(key_path)) => Ok(Some((read(cert.0, cert_path)?, read(key.0, key_path)?))),
        _ => bail!("set both {} and {}, or neither", cert.0, key.0),
    }
}

fn read(key: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{key}: cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use codelia_types::Mode;

    use super::*;
    use crate::options::{SEPARATE, api, tests::config};

    #[test]
    fn incomplete_tls_configuration_is_refused() {
        let half = config(&[("CODELIA_API_TLS_CERT", "/cert.pem")]);
        assert!(api(&half, Mode::Logical, SEPARATE).unwrap_err().to_string().contains("api.tls_key"));
        let half = config(&[("CODELIA_INTERNAL_TLS_CA", "/ca.pem")]);
        assert!(internal(&half).unwrap_err().to_string().contains("internal.tls_ca"));
    }
}
