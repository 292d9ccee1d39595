//! The trust store of sandboxes whose requests get credentials: the system's authorities, and the one
//! with which the proxy terminates TLS for the hosts of those credentials.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use codelia_egress::{Authority, AuthorityError, ensure_authority};
use codelia_policy::{Mount, Plan};

/// Where most programs look for the system's authorities.
const SYSTEM_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The variables of programs that look elsewhere.
const VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "CARGO_HTTP_CAINFO",
    "GIT_SSL_CAINFO",
];

/// The trust store could not be created.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The files of the authority cannot be created.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file cannot be read, or the directory not be created.
    #[error("cannot use {}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// The text of a trust store.
#[derive(Debug, Clone)]
pub(crate) struct TrustStore(Arc<str>);

impl TrustStore {
    /// Reads the system's authorities and that of the proxy, which it creates the first time.
    pub(super) fn load(authority: &Authority) -> Result<Self, TrustError> {
        if let Some(directory) = authority.key_file.parent() {
            let created = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
            created.map_err(at(directory))?;
        }
        ensure_authority(authority)?;
        let read = |path: &Path| fs::read_to_string(path).map_err(at(path));
        let system = read(Path::new(SYSTEM_BUNDLE))?;
        Ok(Self(format!("{system}\n{}", read(&authority.certificate_file)?).into()))
    }

    /// Puts it into a sandbox. The variables of the caller win.
    pub(crate) fn add_to(&self, plan: &mut Plan) {
        plan.mounts.push(Mount::File { target: SYSTEM_BUNDLE.into(), text: self.0.to_string() });
        for name in VARIABLES {
            plan.env.entry(name.to_owned()).or_insert_with(|| SYSTEM_BUNDLE.to_owned());
        }
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> TrustError {
    move |source| TrustError::File { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_has_system_authorities_and_own_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join("ca").join(name);
        let authority = Authority { certificate_file: file("ca.crt"), key_file: file("ca.key") };
        let Ok(store) = TrustStore::load(&authority) else {
            assert!(!Path::new(SYSTEM_BUNDLE).exists(), "the system has authorities");
            return;
        };
        let own = fs::read_to_string(file("ca.crt")).unwrap();
        assert!(store.0.ends_with(&own) && store.0.len() > own.len() + 1000);
        assert!(!store.0.contains("PRIVATE KEY"));
        assert_eq!(&*TrustStore::load(&authority).unwrap().0, &*store.0, "it is created once");
    }
}
