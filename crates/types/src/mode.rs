//! Sandbox modes and network modes.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The text is not one of the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown value {value:?} (expected one of {allowed})")]
pub struct UnknownValue {
    /// The text that was given.
    pub value: String,
    /// The values that are allowed, separated by commas.
    pub allowed: &'static str,
}

/// Which backend isolates a run, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Private directory, clean environment, limits. Isolates nothing; for development.
    Logical,
    /// Namespaces through bubblewrap.
    Bwrap,
    /// Namespaces through nsjail.
    Nsjail,
    /// Namespaces that Codelia makes itself, out of a zygote for each session.
    Native,
    /// A container for each run.
    Container,
}

impl Mode {
    /// All modes, weakest first.
    pub const ALL: [Self; 5] =
        [Self::Logical, Self::Bwrap, Self::Nsjail, Self::Native, Self::Container];

    /// The word for the mode in configuration, metrics and the database.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Logical => "logical",
            Self::Bwrap => "bwrap",
            Self::Nsjail => "nsjail",
            Self::Native => "native",
            Self::Container => "container",
        }
    }
}

/// The network that a run may reach, tightest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// Through the egress proxy only.
    Proxy,
    /// The host's network.
    Host,
}

impl NetworkMode {
    /// All modes, tightest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Proxy, Self::Host];

    /// The word for the mode, as in documents.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Proxy => "proxy",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for NetworkMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Mode {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text).ok_or_else(|| UnknownValue {
            value: text.to_owned(),
            allowed: "logical, bwrap, nsjail, native, container",
        })
    }
}

impl FromStr for NetworkMode {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.as_str() == text)
            .ok_or_else(|| UnknownValue { value: text.to_owned(), allowed: "none, proxy, host" })
    }
}
