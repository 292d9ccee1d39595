//! `client.toml` in a data directory: how to reach the local `up`.

use std::{io::ErrorKind, path::Path};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// File in the data directory with the endpoint and key of the local `up`.
pub const FILE: &str = "client.toml";

/// Contents of `client.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientFile {
    pub endpoint: String,
    pub api_key: String,
}

impl ClientFile {
    /// Reads the file in a data directory; `None` if it does not exist.
    pub fn read(data_dir: &Path) -> Result<Option<Self>> {
        let path = data_dir.join(FILE);
        let read = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => Err(error.into()),
            Ok(text) => toml::from_str(&text).map_err(anyhow::Error::from),
        };
        read.map(Some).with_context(|| format!("cannot read {}", path.display()))
    }
}
