//! [`ToolError`]: why a tool may not be used or changed.

use std::collections::HashMap;

use codelia_policy::IsolationLevel;
use codelia_store::{MAX_TOOLS, ToolNotChanged};
use codelia_types::{Reason, ToolId};
use tonic::Code;

use super::error::ApiError;

/// Why a tool may not be used or changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolError {
    /// It is quarantined.
    Quarantined { id: ToolId, reason: String },
    /// It declares less than the highest level, and no operator approved this version.
    NotApproved { id: ToolId, version: i64, level: IsolationLevel },
    /// It has this version, and not the expected one.
    Changed { id: ToolId, version: i64 },
    /// The tenant has as many tools as it may.
    TooMany,
}

impl ToolError {
    /// The text for the caller.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Quarantined { id, reason } => format!(
                "tool: {id} is quarantined: {reason}; an administrator releases it with `codelia tools release {id}`"
            ),
            Self::NotApproved { id, version, level } => format!(
                "tool: {id} declares {level}, and no operator approved version {version}; declare LEVEL_2, or ask an \
                 operator (codelia tools approve)"
            ),
            Self::Changed { id, version: 0 } => {
                format!("expected_version: tool {id} does not exist; leave it out, or expect 0")
            }
            Self::Changed { id, version } => {
                format!("tool {id} has version {version} now; read it and repeat the call")
            }
            Self::TooMany => format!("the tenant has {MAX_TOOLS} tools; delete one that is not used"),
        }
    }

    pub(super) fn code_and_reason(&self) -> (Code, Reason) {
        match self {
            Self::Quarantined { .. } => (Code::FailedPrecondition, Reason::ToolQuarantined),
            Self::NotApproved { .. } => (Code::FailedPrecondition, Reason::ToolNotApproved),
            Self::Changed { .. } => (Code::Aborted, Reason::ToolChanged),
            Self::TooMany => (Code::ResourceExhausted, Reason::TooManyTools),
        }
    }

    /// The field and the tool.
    pub(super) fn metadata(&self) -> HashMap<String, String> {
        match self {
            Self::Quarantined { id, .. } | Self::NotApproved { id, .. } | Self::Changed { id, .. } => {
                HashMap::from([("field".to_owned(), "tool".to_owned()), ("tool".to_owned(), id.to_string())])
            }
            Self::TooMany => HashMap::new(),
        }
    }
}

impl ApiError {
    /// Why a tool was not changed.
    pub(crate) fn tool_not_changed(id: &ToolId, why: ToolNotChanged) -> Self {
        let id = id.clone();
        Self::Tool(match why {
            ToolNotChanged::NotFound => return Self::not_found("tool", id),
            ToolNotChanged::Version(version) => ToolError::Changed { id, version },
            ToolNotChanged::TooMany => ToolError::TooMany,
            ToolNotChanged::Quarantined(reason) => ToolError::Quarantined { id, reason },
            ToolNotChanged::Level(level) => {
                return Self::invalid(
                    "level",
                    format!("the tool declares {level}; approve that, or LEVEL_2 to withdraw the approval"),
                );
            }
        })
    }
}
