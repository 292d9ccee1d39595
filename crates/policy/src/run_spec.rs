//! A run as the api admitted it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use codelia_types::{CommandSpec, Mode, NetworkMode};

use crate::{Limits, LimitsRequest, Policy};

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
    /// The limits that the caller or a policy requested. Each must be enforced, or the run is refused.
    #[serde(rename = "asked")]
    pub requested_limits: LimitsRequest,
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
