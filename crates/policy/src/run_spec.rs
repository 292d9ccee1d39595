//! The specification of a run.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use codelia_types::{CommandSpec, Mode, NetworkMode, ToolId, TransactionMode};

use crate::{IsolationLevel, Limits, LimitsRequest, Policy};

/// A run as the api admitted it: everything that a worker needs to execute it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The command to execute.
    pub command: CommandSpec,
    /// The mode to execute it in.
    pub mode: Mode,
    /// The network that the run was admitted with; its policy may be tighter. `None` in mode
    /// `logical` unless it was requested.
    pub network: Option<NetworkMode>,
    /// The limits that the run is held to.
    pub limits: Limits,
    /// The limits that the caller or a policy requested. Each must be enforced, or the run is
    /// refused.
    #[serde(rename = "asked")]
    pub requested_limits: LimitsRequest,
    /// The effective policy: the run's, merged into the session's.
    #[serde(default)]
    pub policy: Policy,
    /// Whether the run is canceled when the call that started it ends.
    pub ends_with_caller: bool,
    /// The fate of its changes to the workspace. `None` changes it directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction: Option<TransactionMode>,
    /// The tool that the command belongs to. Absent if the run names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<RunTool>,
}

/// The tool of a run, as it was when the run was admitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunTool {
    /// The tool that the run names.
    pub id: ToolId,
    /// The version of its declaration.
    pub version: i64,
    /// The isolation that the run gets in an isolating mode: less than [`IsolationLevel::Full`]
    /// only if an operator approved it.
    pub level: IsolationLevel,
}

impl RunSpec {
    /// A run that asks for nothing but its command and mode: default limits, no policy.
    #[must_use]
    pub fn new(command: CommandSpec, mode: Mode) -> Self {
        Self {
            command,
            mode,
            network: None,
            limits: Limits::default(),
            requested_limits: LimitsRequest::default(),
            policy: Policy::default(),
            ends_with_caller: false,
            transaction: None,
            tool: None,
        }
    }

    /// The wall time limit.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.limits.timeout
    }

    /// The isolation of the run.
    #[must_use]
    pub fn level(&self) -> IsolationLevel {
        let of_mode = IsolationLevel::from_mode(self.mode);
        self.tool.as_ref().map_or(of_mode, |tool| of_mode.min(tool.level))
    }
}
