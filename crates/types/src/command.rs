//! The command that a run executes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Program, arguments, environment and terminal of one command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// Program and arguments. The program is looked up in `PATH`.
    pub argv: Vec<String>,
    /// Environment variables added to the clean environment.
    pub env: BTreeMap<String, String>,
    /// Working directory, relative to the session's root. Empty means the root.
    pub working_directory: String,
    /// Allocate a terminal of this size.
    pub terminal: Option<TerminalSize>,
    /// Keep stdin open. Otherwise stdin is empty.
    pub stdin: bool,
}

impl CommandSpec {
    /// A command with this argv and defaults for everything else.
    #[must_use]
    pub fn new<I, S>(argv: I) -> Self
    where
        I: IntoIterator<Item = S>,
        S: Into<String>,
    {
        Self { argv: argv.into_iter().map(Into::into).collect(), ..Self::default() }
    }
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}
