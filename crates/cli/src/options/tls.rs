//! Certificates and keys of the API server and of the connections between API and workers.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use codelia_server::TlsFiles;

use crate::config::{Config, Profile};

/// Certificate of the public API server; `None` if TLS is off, which other machines may only see if
/// the configuration says so.
pub(super) fn public(config: &Config) -> Result<Option<TlsFiles>> {
    let api = &config.api;
    let files = match (&api.tls_cert, &api.tls_key) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some(files(cert, key, None)),
        _ => bail!("set both api.tls_cert and api.tls_key, or neither"),
    };
    if files.is_none() && !api.listen.ip().is_loopback() && !api.allow_plaintext {
        if config.profile == Profile::Prod {
            bail!(
                "api.listen: {} is not a loopback address, and profile prod does not send keys without TLS: \
                 set api.tls_cert and api.tls_key (`codelia certs dev` creates some), or \
                 api.allow_plaintext = true if a proxy or mesh in front of it does TLS",
                api.listen
            );
        }
        tracing::warn!(
            listen = %api.listen,
            "API served without TLS to other machines: keys and output can be read on the way; set \
             api.tls_cert and api.tls_key (`codelia certs dev` creates some)"
        );
    }
    Ok(files)
}

/// Mutual TLS between API and workers; `None` if it is off.
pub(super) fn internal(config: &Config) -> Result<Option<TlsFiles>> {
    let internal = &config.internal;
    match (&internal.tls_ca, &internal.tls_cert, &internal.tls_key) {
        (None, None, None) => Ok(None),
        (Some(ca), Some(cert), Some(key)) => Ok(Some(files(cert, key, Some(ca)))),
        _ => bail!("set all of internal.tls_ca, internal.tls_cert and internal.tls_key, or none"),
    }
}

fn files(cert: &Path, key: &Path, ca: Option<&PathBuf>) -> TlsFiles {
    TlsFiles { cert: cert.to_owned(), key: key.to_owned(), ca: ca.cloned() }
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
    #[test]
    fn plaintext_for_other_machines_is_refused_in_prod() {
        let prod = ("CODELIA_PROFILE", "prod");
        let open = ("CODELIA_API_LISTEN", "0.0.0.0:7300");
        let error = public(&config(&[prod, open])).unwrap_err().to_string();
        for named in ["api.listen", "api.tls_cert", "api.allow_plaintext", "codelia certs dev"] {
            assert!(error.contains(named), "{named}: {error}");
        }
        let certificate = [("CODELIA_API_TLS_CERT", "/cert.pem"), ("CODELIA_API_TLS_KEY", "/key.pem")];
        for allowed in [
            &[prod][..],
            &[prod, ("CODELIA_API_LISTEN", "[::1]:7300")],
            &[open],
            &[prod, open, ("CODELIA_API_ALLOW_PLAINTEXT", "true")],
            &[prod, open, certificate[0], certificate[1]],
        ] {
            assert!(public(&config(allowed)).is_ok(), "{allowed:?}");
        }
    }
}
