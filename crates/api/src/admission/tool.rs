//! The tool of a run.

use codelia_policy::{IsolationLevel, RunTool};
use codelia_store::Tool;
use codelia_types::{Reason, ToolId};

use crate::error::ApiError;

/// What a run has of its tool. What a policy or a flag requires above its level is added.
pub(super) fn run_tool(tool: &Tool, required: [Option<IsolationLevel>; 2]) -> RunTool {
    let declared = tool.declaration.level();
    let level = required.into_iter().flatten().fold(declared, IsolationLevel::max);
    RunTool { id: tool.id.clone(), version: tool.version, level }
}

/// The tool is quarantined.
pub(crate) fn tool_quarantined(id: &ToolId, why: &str) -> ApiError {
    let message = format!(
        "tool: {id} is quarantined: {why}; an administrator releases it with `codelia tools release {id}`"
    );
    of_tool(Reason::ToolQuarantined, message, id)
}

/// An error about the tool of a run.
pub(crate) fn of_tool(reason: Reason, message: String, id: &ToolId) -> ApiError {
    ApiError::new(reason, message).with("field", "tool").with("tool", id)
}
