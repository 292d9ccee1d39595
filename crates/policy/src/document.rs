//! The words of a policy document and the entries of its lists. [`fields`](crate::fields) has the
//! document itself.

use std::{fmt, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

use codelia_types::{Mode, UnknownValue};

/// How much isolation a command needs, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum IsolationLevel {
    /// `LEVEL_0`: none. Mode `logical` only.
    #[serde(rename = "LEVEL_0")]
    None,
    /// `LEVEL_1`: private processes, limits and files.
    #[serde(rename = "LEVEL_1")]
    Process,
    /// `LEVEL_2`: every namespace, a private root, no network, filtered system calls.
    #[serde(rename = "LEVEL_2")]
    Full,
}

impl IsolationLevel {
    /// All levels, weakest first.
    pub const ALL: [Self; 3] = [Self::None, Self::Process, Self::Full];

    /// The word for the level, as in documents.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "LEVEL_0",
            Self::Process => "LEVEL_1",
            Self::Full => "LEVEL_2",
        }
    }

    /// The level that a mode provides.
    #[must_use]
    pub fn of(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::None,
            Mode::Bwrap | Mode::Nsjail | Mode::Native | Mode::Container => Self::Full,
        }
    }
}

impl fmt::Display for IsolationLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for IsolationLevel {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, UnknownValue> {
        Self::ALL.into_iter().find(|level| level.as_str() == text).ok_or_else(|| UnknownValue {
            value: text.to_owned(),
            allowed: "LEVEL_0, LEVEL_1, LEVEL_2",
        })
    }
}

/// Whether a command may change host files, and whether it may read them without asking. Least
/// strict first: each mode has the restrictions of the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FilesystemMode {
    /// Never modify host files: `read_write_paths` must be empty, and changes in `overlay_paths`
    /// stay in the session.
    Static,
    /// The first read of a file below `read_only_paths` waits for a person's decision.
    /// `overlay_paths` must be empty too.
    Dynamic,
}

/// What the names of a [`SyscallPolicy`](crate::SyscallPolicy) do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyscallMode {
    /// Allow only these system calls of the default list.
    Allow,
    /// Allow the default list except these system calls.
    Deny,
}

/// Where a command's environment comes from, least restrictive first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvironmentMode {
    /// The worker's environment. Always refused, because the caller must not see it.
    Inherit,
    /// A clean environment and the variables that the run sets.
    Clean,
    /// A clean environment and, of the variables that the run sets, only the named ones.
    Explicit,
}

/// A directory of a layout.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutDirectory {
    /// The path, relative to the workspace.
    pub path: PathBuf,
    /// Size of all files below it together, in bytes. A run that exceeds it is ended. Absent leaves
    /// the limit of the session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
}
