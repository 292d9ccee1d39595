//! The words of a policy document and the entries of its lists. [`fields`](crate::fields) has the
//! document itself.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use codelia_types::{Mode, words};

words! {
    /// How much isolation a command needs, weakest first.
    #[derive(PartialOrd, Ord)]
    pub enum IsolationLevel {
        /// `LEVEL_0`: none. Mode `logical` only.
        None = "LEVEL_0",
        /// `LEVEL_1`: private processes, limits and files.
        Process = "LEVEL_1",
        /// `LEVEL_2`: every namespace, a private root, no network, filtered system calls.
        Full = "LEVEL_2",
    }
}

impl IsolationLevel {
    /// The level that a mode provides.
    #[must_use]
    pub fn from_mode(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::None,
            Mode::Bwrap | Mode::Nsjail | Mode::Native | Mode::Container => Self::Full,
        }
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

/// The effect of the names of a [`SyscallPolicy`](crate::SyscallPolicy).
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
