//! `codelia tools …`.

use std::path::Path;

use anyhow::{Context, Result};
use codelia_policy::{Format, ToolDocument};
use codelia_proto::v1::{
    self, ApproveToolLevelRequest, DeleteToolRequest, GetToolRequest, IsolationLevel,
    ListToolsRequest, QuarantineToolRequest, RegisterToolRequest, ReleaseToolRequest, Tool,
    ToolDeclaration,
};

use crate::{
    args::{self, ToolName},
    client::Client,
    output::Output,
    policy_file, units,
};

/// Executes `codelia tools`.
pub(crate) async fn tools(client: &Client, command: args::Tools, output: Output) -> Result<()> {
    let tool = match command {
        args::Tools::List { tenant } => return list(client, tenant, output).await,
        args::Tools::Rm(name) => {
            client.tools().delete_tool(DeleteToolRequest { name: resource(&name) }).await?;
            return output.print(&serde_json::json!({ "toolId": name.tool }), "");
        }
        args::Tools::Register { file, expect } => {
            let request =
                RegisterToolRequest { expected_version: expect, ..register_request(&file)? };
            client.call(request).await?
        }
        args::Tools::Show(name) => client.call(GetToolRequest { name: resource(&name) }).await?,
        args::Tools::Approve { name, level, version, reason } => {
            let level = IsolationLevel::from(Some(level)).into();
            let name = resource(&name);
            client.call(ApproveToolLevelRequest { name, version, level, reason }).await?
        }
        args::Tools::Quarantine { name, reason } => {
            client.call(QuarantineToolRequest { name: resource(&name), reason }).await?
        }
        args::Tools::Release { name, reason } => {
            client.call(ReleaseToolRequest { name: resource(&name), reason }).await?
        }
    };
    output.print_message(&tool)
}

fn resource(name: &ToolName) -> String {
    match &name.tenant {
        Some(tenant) => format!("tenants/{tenant}/tools/{}", name.tool),
        None if name.tool.contains('/') => name.tool.clone(),
        None => format!("tools/{}", name.tool),
    }
}

/// Reads the file of a tool. Its extension names the format.
fn register_request(file: &Path) -> Result<RegisterToolRequest> {
    let name = || file.display().to_string();
    let format = Format::from_path(file).with_context(name)?;
    let document =
        ToolDocument::parse(&policy_file::read_text(file)?, format).with_context(name)?;
    let name = format!("tools/{}", document.name);
    let declaration = document.into_declaration();
    let declaration = ToolDeclaration {
        policy: Some((&declaration.policy).into()),
        owner: declaration.owner,
        executables: declaration.executables,
        command_pattern: declaration.command_pattern,
        transactional: declaration.transactional,
    };
    Ok(RegisterToolRequest { name, declaration: Some(declaration), expected_version: None })
}

async fn list(client: &Client, tenant: Option<String>, output: Output) -> Result<()> {
    let parent = format!("tenants/{}", tenant.as_deref().unwrap_or("-"));
    let request = ListToolsRequest { parent, ..Default::default() };
    let tools = client.list(request, usize::MAX).await?;
    let header = ["TOOL", "VERSION", "LEVEL", "STATE", "COMMANDS", "OWNER", "CHANGED"];
    output.print_list(&header, &tools, |tool: &Tool| {
        let declaration = tool.declaration.clone().unwrap_or_default();
        let commands = declaration.executables.into_iter().chain(declaration.command_pattern);
        vec![
            tool.tool_id.clone(),
            tool.version.to_string(),
            tool.level().to_level().map(|level| level.to_string()).unwrap_or_default(),
            state(tool).to_owned(),
            commands.collect::<Vec<_>>().join(", "),
            declaration.owner,
            units::age(tool.update_time.as_ref()),
        ]
    })
}

/// Whether runs can use a tool.
fn state(tool: &Tool) -> &'static str {
    match (&tool.quarantine, &tool.approval, tool.level()) {
        (Some(_), _, _) => "quarantined",
        (None, None, v1::IsolationLevel::IsolationLevel0 | v1::IsolationLevel::IsolationLevel1) => {
            "not approved"
        }
        _ => "usable",
    }
}
