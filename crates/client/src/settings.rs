//! The part of the configuration that client commands need.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use codelia_types::option;
use secrecy::SecretString;

use crate::detach_keys::DetachKeys;

/// A value from the command line: the path of its key, and the text.
pub type Flag = (&'static str, String);

codelia_types::options! {
    /// The section `client` of the configuration.
    pub struct Options {
        /// Named server to call. Default: see `codelia context show`.
        pub context: Option<String> = None,
        /// URL of the server to call. Default: `DATA_DIR/client.toml`.
        pub endpoint: Option<String> = None,
        /// API key. Default: `DATA_DIR/client.toml`.
        #[serde(serialize_with = "option::masked")]
        pub api_key: Option<SecretString> = None,
        /// Authorities that sign the server's certificate, PEM. Default: the system's certificates.
        pub tls_ca: Option<PathBuf> = None,
        /// Keys that leave a run's terminal while the run continues, unless `--detach-keys` names
        /// others: letters, or `ctrl-` with a letter or one of `@[\]^_`; empty for none.
        #[serde(with = "option::text")]
        pub detach_keys: DetachKeys = DetachKeys::default(),
    }
}

/// The configuration of client commands.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Directory of the local `codelia up`.
    pub data_dir: PathBuf,
    pub options: Options,
    /// Where each configured key comes from: `flag`, `env:NAME` or `file:PATH`.
    pub sources: BTreeMap<&'static str, String>,
}

impl Settings {
    /// Keys whose source commands report.
    pub const KEYS: [&'static str; 5] =
        ["data_dir", "client.context", "client.endpoint", "client.api_key", "client.tls_ca"];

    /// The source of a configured key; `None` if it is not set.
    pub(crate) fn source(&self, path: &str) -> Option<&str> {
        self.sources.get(path).map(String::as_str)
    }
}

/// The directory that a variable names, or `default` below the home directory; `None` without one.
#[must_use]
pub fn home_directory(variable: &str, default: &str) -> Option<PathBuf> {
    let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let home = if cfg!(windows) { "USERPROFILE" } else { "HOME" };
    value(variable).map(PathBuf::from).or_else(|| Some(Path::new(&value(home)?).join(default)))
}
