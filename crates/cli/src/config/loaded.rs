//! The effective configuration and where its values come from.

use codelia_client::Settings;
use figment::{Figment, Metadata, Source};

use super::schema::Config;

/// Source of values that are not set.
pub(super) const DEFAULT: &str = "default";

/// The effective configuration, with the source of each value.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    pub(super) figment: Figment,
}

impl Loaded {
    /// Whether the key has a value other than its default.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.figment.find_metadata(path).is_some_and(|metadata| metadata.name != DEFAULT)
    }

    /// The settings of client commands.
    pub(crate) fn client_settings(&self) -> Settings {
        let sources =
            Settings::KEYS.into_iter().filter_map(|path| Some((path, self.source(path)?)));
        Settings {
            data_dir: self.config.data_dir.clone(),
            options: self.config.client.clone(),
            sources: sources.collect(),
        }
    }

    /// The source of a value: `flag`, `env:NAME` or `file:PATH`; `None` if the key is not set.
    pub(crate) fn source(&self, path: &str) -> Option<String> {
        self.figment.find_metadata(path).filter(|_| self.is_set(path)).map(source)
    }
}

/// Describes the source of a value: `default`, `file:PATH`, `env:NAME` or `flag`.
pub(super) fn source(metadata: &Metadata) -> String {
    match &metadata.source {
        Some(Source::File(path)) => format!("file:{}", path.display()),
        _ => metadata.name.to_string(),
    }
}
