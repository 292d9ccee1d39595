//! What is executed.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Limits, LimitsRequest, Mode, NetworkMode, Policy};

/// Program, arguments and surroundings of one command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// Program and arguments; the program is looked up in PATH.
    pub argv: Vec<String>,
    /// Environment, on top of the clean one.
    pub env: BTreeMap<String, String>,
    /// Working directory, relative to the session's root; empty for the root.
    pub working_directory: String,
    /// Allocate a terminal of this size.
    pub terminal: Option<TerminalSize>,
    /// Keep stdin open; otherwise it is empty.
    pub stdin: bool,
}

/// A terminal's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

/// A run as it was admitted: everything a worker needs to know to execute it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSpec {
    /// What is executed.
    pub command: CommandSpec,
    /// In which mode.
    pub mode: Mode,
    /// What it may reach.
    pub network: Option<NetworkMode>,
    /// The limits that hold.
    pub limits: Limits,
    /// Which of the limits somebody asked for; they must be enforced or the run is refused.
    pub asked: LimitsRequest,
    /// What it may do: its own policy under that of its session.
    #[serde(default)]
    pub policy: Policy,
    /// Whether the run ends with the call that started it.
    pub ends_with_caller: bool,
}

impl RunSpec {
    /// Wall time limit.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.limits.timeout
    }
}
