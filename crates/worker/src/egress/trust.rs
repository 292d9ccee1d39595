//! The trust store of sandboxes whose requests get credentials: the system's authorities, and the
//! one with which the proxy terminates TLS for the hosts of those credentials.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use codelia_egress::{Authority, SetupError, ensure_authority};
use codelia_policy::{CA_VARIABLES, Mount, Plan};

/// Where most programs look for the system's authorities.
const SYSTEM_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The trust store could not be created.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The files of the authority cannot be created.
    #[error(transparent)]
    Authority(#[from] SetupError),
    /// A file cannot be read, or the directory not be created.
    #[error("cannot use {}", path.display())]
    File {
        /// The path of the file or directory.
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

    /// Puts it into a sandbox, in the place of the host's or the image's. The variables of the
    /// caller win.
    ///
    /// # Errors
    /// The policy opens a path of the host there, in which nothing may be written.
    pub(crate) fn add_to(&self, plan: &mut Plan) -> Result<(), OpenedPath> {
        let target = Path::new(SYSTEM_BUNDLE);
        let is_opened = |mount: &Mount| match mount {
            Mount::Bind { .. }
            | Mount::Overlay { .. }
            | Mount::Transaction { .. }
            | Mount::Volume { .. } => target.starts_with(mount.target()),
            _ => false,
        };
        if plan.mounts.iter().any(is_opened) {
            return Err(OpenedPath);
        }
        // Before what the policy hides, which comes last.
        let at = plan.mounts.iter().position(|mount| *mount == Mount::Proc).unwrap_or_default();
        plan.mounts.insert(at, Mount::File { target: target.to_owned(), text: self.0.to_string() });
        for name in CA_VARIABLES {
            plan.env.entry(name.to_owned()).or_insert_with(|| SYSTEM_BUNDLE.to_owned());
        }
        Ok(())
    }
}

/// The policy opens the place of the trust store.
#[derive(Debug, thiserror::Error)]
#[error(
    "credentials need {SYSTEM_BUNDLE}, which policy.filesystem opens from the host (leave it out there)"
)]
pub(crate) struct OpenedPath;

fn at(path: &Path) -> impl FnOnce(io::Error) -> TrustError {
    move |source| TrustError::File { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{Enforceable, PlanTarget, RunSpec};
    use codelia_types::{CommandSpec, Mode, RunId, SessionId};

    use super::*;

    fn plan(mounts: Vec<Mount>) -> Plan {
        let spec = RunSpec::new(CommandSpec::new(["true"]), Mode::Logical);
        let (sandbox, session) = (RunId::generate(), SessionId::generate());
        let target = PlanTarget { sandbox, session, root: "/root".into() };
        Plan { mounts, ..Plan::logical(target, &spec, Enforceable::default()).unwrap() }
    }

    #[test]
    fn store_replaces_only_what_the_policy_does_not_open() {
        let store = TrustStore("text".into());
        let mut free = plan(vec![Mount::Runtime { path: "/etc/ssl/certs".into() }, Mount::Proc]);
        free.env.insert("SSL_CERT_FILE".into(), "own".into());
        store.add_to(&mut free).unwrap();
        assert!(
            matches!(&free.mounts[1], Mount::File { target, .. } if target == Path::new(SYSTEM_BUNDLE))
        );
        assert_eq!(
            (&*free.env["SSL_CERT_FILE"], &*free.env["CURL_CA_BUNDLE"]),
            ("own", SYSTEM_BUNDLE)
        );
        let path = PathBuf::from("/etc/ssl");
        let bind = Mount::Bind { source: path.clone(), target: path, writable: false };
        assert!(store.add_to(&mut plan(vec![bind])).is_err());
    }

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
