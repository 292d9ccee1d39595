//! Contexts: named servers with their keys, in a file that only its owner may read.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::{settings::home_directory, spelling, system};

/// Largest file that is read.
const MAX_BYTES: u64 = 1024 * 1024;

/// The contexts of this user, and the one in use.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Contexts {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    #[serde(default)]
    pub(crate) contexts: BTreeMap<String, Context>,
}

/// A server and a key for it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Context {
    pub(crate) endpoint: String,
    pub(crate) api_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls_ca: Option<PathBuf>,
}

impl Contexts {
    /// Reads the contexts of this user. Without a file there are none.
    pub(crate) fn read() -> Result<Self> {
        path().map_or_else(|| Ok(Self::default()), |path| Self::read_from(&path))
    }

    /// Writes the contexts of this user.
    pub(crate) fn write(&self) -> Result<()> {
        self.write_to(&path().context("neither XDG_CONFIG_HOME nor HOME is set")?)
    }

    /// Returns a context.
    pub(crate) fn get(&self, name: &str) -> Result<&Context> {
        self.contexts.get(name).with_context(|| {
            let hint = spelling::hint(name, self.contexts.keys().map(String::as_str));
            format!("context {name:?} not found{hint} (list contexts with `codelia context list`)")
        })
    }

    /// Returns the context in use; `None` if none is.
    pub(crate) fn current(&self) -> Result<Option<(String, Context)>> {
        let Some(name) = &self.current else { return Ok(None) };
        Ok(Some((name.clone(), self.get(name)?.clone())))
    }

    fn read_from(path: &Path) -> Result<Self> {
        let cannot = || format!("cannot read {}", path.display());
        let file = match std::fs::File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            file => file.with_context(cannot)?,
        };
        if system::is_shared(&file.metadata().with_context(cannot)?) {
            bail!("{0} holds keys, but others may access it: run `chmod 600 {0}`", path.display());
        }
        let mut text = String::new();
        file.take(MAX_BYTES + 1).read_to_string(&mut text).with_context(cannot)?;
        ensure!(
            text.len() as u64 <= MAX_BYTES,
            "{} is larger than {MAX_BYTES} bytes",
            path.display()
        );
        toml::from_str(&text).with_context(cannot)
    }

    /// Replaces the file atomically.
    fn write_to(&self, path: &Path) -> Result<()> {
        let write = || -> Result<()> {
            let directory = path.parent().context("the path has no directory")?;
            system::create_private_directory(directory)?;
            // Readable only by its owner.
            let mut new = tempfile::NamedTempFile::new_in(directory)?;
            new.write_all(toml::to_string(self)?.as_bytes())?;
            new.persist(path)?;
            Ok(())
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}

fn path() -> Option<PathBuf> {
    home_directory("XDG_CONFIG_HOME", ".config").map(|home| home.join("codelia/contexts.toml"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn contexts() -> Contexts {
        let context = Context {
            endpoint: "http://here:1".into(),
            api_key: "cdl_a".into(),
            tls_ca: Some("/ca".into()),
        };
        Contexts { current: Some("one".into()), contexts: [("one".to_owned(), context)].into() }
    }

    #[test]
    fn contexts_are_private_and_readable() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/contexts.toml");
        assert!(Contexts::read_from(&path).unwrap().contexts.is_empty());
        contexts().write_to(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let read = Contexts::read_from(&path).unwrap();
        let (name, context) = read.current().unwrap().unwrap();
        assert_eq!((name.as_str(), context.api_key.as_str()), ("one", "cdl_a"));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(Contexts::read_from(&path).unwrap_err().to_string().contains("chmod 600"));
    }

    #[test]
    fn missing_context_has_a_hint() {
        let error = contexts().get("onee").unwrap_err().to_string();
        assert!(error.contains("context \"onee\" not found; did you mean one?"), "{error}");
        let gone = Contexts { current: Some("gone".into()), ..contexts() };
        assert!(gone.current().is_err());
    }
}
