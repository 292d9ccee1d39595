//! `ToolService`: registers tools, approves their levels, quarantines and releases them. The auth
//! layer requires the scopes.

mod cache;

use std::sync::Arc;

use codelia_policy::{DeclarationError, ToolDeclaration};
use codelia_proto::{
    timestamp_to_proto,
    v1::{self, tool_service_server::ToolService},
};
use codelia_store::{Caller, MAX_TOOLS, Scope, Tool, ToolChange, ToolChanged, ToolNotChanged};
use codelia_types::{Reason, TenantId, ToolId};

pub(crate) use self::cache::ToolCache;
use crate::{
    admission::{of_tool, rules::Rules, tool_quarantined},
    auth,
    context::Context,
    error::ApiError,
    rpc::serve,
    wire::{
        paging::Page,
        resource_name::{self, TenantName},
        validate,
    },
};

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Tools {
    pub(crate) context: Arc<Context>,
}

/// The tenant that a name is about: the caller's, or any for operators.
fn tenant_of(caller: &Caller, name: TenantName) -> Option<TenantId> {
    match name {
        TenantName::Own => Some(caller.tenant.clone()),
        TenantName::Id(id) => {
            (id == caller.tenant || auth::has_scope(caller, Scope::Operator)).then_some(id)
        }
    }
}

/// The tool that a request names.
fn target(caller: &Caller, name: &str) -> Result<(TenantId, ToolId), ApiError> {
    let (tenant, id) = resource_name::tool("name", name)?;
    match tenant_of(caller, tenant) {
        Some(tenant) => Ok((tenant, id)),
        None => Err(ApiError::not_found("tool", id)),
    }
}

fn not_changed(id: &ToolId, why: ToolNotChanged) -> ApiError {
    match why {
        ToolNotChanged::NotFound => ApiError::not_found("tool", id),
        ToolNotChanged::Version(version) => {
            let message = match version {
                0 => {
                    format!("expected_version: tool {id} does not exist; leave it out, or expect 0")
                }
                _ => format!("tool {id} has version {version} now; read it and repeat the call"),
            };
            of_tool(Reason::ToolChanged, message, id)
        }
        ToolNotChanged::TooMany => ApiError::new(
            Reason::TooManyTools,
            format!("the tenant has {MAX_TOOLS} tools; delete one that is not used"),
        ),
        ToolNotChanged::Quarantined(reason) => tool_quarantined(id, &reason),
        ToolNotChanged::Level(level) => ApiError::invalid(
            "level",
            format!("the tool declares {level}; approve that, or LEVEL_2 to withdraw the approval"),
        ),
    }
}

/// The tool after a change.
fn changed(id: &ToolId, result: ToolChanged) -> Result<Option<v1::Tool>, ApiError> {
    result.map(|tool| Some(to_proto(&tool))).map_err(|why| not_changed(id, why))
}

impl Tools {
    async fn register_tool(
        &self,
        caller: &Caller,
        wire: v1::RegisterToolRequest,
    ) -> Result<v1::RegisterToolResponse, ApiError> {
        let (tenant, id) = target(caller, &wire.name)?;
        let declaration =
            wire.declaration.ok_or_else(|| ApiError::invalid("declaration", "required"))?;
        let expected = match wire.expected_version {
            Some(version) if version < 0 => {
                return Err(ApiError::invalid("expected_version", "must not be negative"));
            }
            expected => expected,
        };
        let is_large = validate::is_large_policy(declaration.policy.as_ref());
        let check = move |rules: &Rules<'_>| read_declaration(declaration, rules);
        let declaration = self.context.with_policy(caller, is_large, check).await?;
        let change = ToolChange { tenant: &tenant, id: &id, key: caller.key };
        let result = self.context.store.tool_register(change, &declaration, expected).await?;
        Ok(v1::RegisterToolResponse { tool: changed(&id, result)? })
    }

    async fn get_tool(
        &self,
        caller: &Caller,
        wire: v1::GetToolRequest,
    ) -> Result<v1::GetToolResponse, ApiError> {
        let (tenant, id) = target(caller, &wire.name)?;
        let tool = self.context.store.tool_get(&tenant, &id).await?;
        let tool = tool.ok_or_else(|| ApiError::not_found("tool", id))?;
        Ok(v1::GetToolResponse { tool: Some(to_proto(&tool)) })
    }

    async fn list_tools(
        &self,
        caller: &Caller,
        wire: v1::ListToolsRequest,
    ) -> Result<v1::ListToolsResponse, ApiError> {
        let mut page = Page::<ToolId, _>::parse(&caller.tenant, &wire)?;
        let tenant = tenant_of(caller, resource_name::tenant("parent", &wire.parent)?);
        let tenant = tenant.ok_or_else(|| ApiError::not_found("tenant", &wire.parent))?;
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            let rows = self.context.store.tool_list(&tenant, page.after.as_ref(), limit).await?;
            page.add(rows, |tool| (tool.id.clone(), to_proto(&tool)));
        }
        let (tools, next_page_token) = page.finish();
        Ok(v1::ListToolsResponse { tools, next_page_token })
    }

    async fn delete_tool(
        &self,
        caller: &Caller,
        wire: v1::DeleteToolRequest,
    ) -> Result<v1::DeleteToolResponse, ApiError> {
        let (tenant, id) = target(caller, &wire.name)?;
        let change = ToolChange { tenant: &tenant, id: &id, key: caller.key };
        let deleted = self.context.store.tool_delete(change).await?;
        deleted.map_err(|why| not_changed(&id, why))?;
        Ok(v1::DeleteToolResponse {})
    }

    async fn approve_tool_level(
        &self,
        caller: &Caller,
        wire: v1::ApproveToolLevelRequest,
    ) -> Result<v1::ApproveToolLevelResponse, ApiError> {
        let (tenant, id) = target(caller, &wire.name)?;
        if wire.version < 1 {
            return Err(ApiError::invalid("version", "required: the version that you looked at"));
        }
        let level: v1::IsolationLevel = validate::enum_value("level", wire.level)?;
        let level = level.to_level().ok_or_else(|| ApiError::invalid("level", "required"))?;
        let reason = validate::reason(wire.reason)?;
        let change = ToolChange { tenant: &tenant, id: &id, key: caller.key };
        let result = self.context.store.tool_approve(change, wire.version, level, &reason).await?;
        Ok(v1::ApproveToolLevelResponse { tool: changed(&id, result)? })
    }

    async fn quarantine_tool(
        &self,
        caller: &Caller,
        wire: v1::QuarantineToolRequest,
    ) -> Result<v1::QuarantineToolResponse, ApiError> {
        let (tenant, id) = target(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let change = ToolChange { tenant: &tenant, id: &id, key: caller.key };
        let result = self.context.store.tool_quarantine(change, &reason).await?;
        Ok(v1::QuarantineToolResponse { tool: changed(&id, result)? })
    }

    async fn release_tool(
        &self,
        caller: &Caller,
        wire: v1::ReleaseToolRequest,
    ) -> Result<v1::ReleaseToolResponse, ApiError> {
        let (tenant, id) = target(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let change = ToolChange { tenant: &tenant, id: &id, key: caller.key };
        let result = self.context.store.tool_release(change, &reason).await?;
        Ok(v1::ReleaseToolResponse { tool: changed(&id, result)? })
    }
}

fn read_declaration(
    wire: v1::ToolDeclaration,
    rules: &Rules<'_>,
) -> Result<ToolDeclaration, ApiError> {
    let policy = validate::policy(wire.policy, &rules.ceilings)
        .map_err(|error| error.within("declaration"))?;
    let v1::ToolDeclaration { owner, executables, command_pattern, transactional, .. } = wire;
    let declaration =
        ToolDeclaration { owner, executables, command_pattern, policy, transactional };
    declaration.validate(&rules.ceilings).map_err(|DeclarationError { field, message }| {
        ApiError::invalid(format!("declaration.{field}"), message)
    })?;
    Ok(declaration)
}

fn to_proto(tool: &Tool) -> v1::Tool {
    let ToolDeclaration { owner, executables, command_pattern, policy, transactional } =
        &tool.declaration;
    let level = v1::IsolationLevel::from(Some(tool.declaration.level())).into();
    v1::Tool {
        name: format!("tenants/{}/tools/{}", tool.tenant, tool.id),
        tool_id: tool.id.to_string(),
        version: tool.version,
        declaration: Some(v1::ToolDeclaration {
            owner: owner.clone(),
            executables: executables.clone(),
            command_pattern: command_pattern.clone(),
            policy: Some(policy.into()),
            transactional: *transactional,
        }),
        level,
        create_time: Some(timestamp_to_proto(tool.created_at)),
        update_time: Some(timestamp_to_proto(tool.updated_at)),
        key_id: tool.key.to_string(),
        approval: tool.approval.as_ref().map(|approval| v1::ToolApproval {
            level,
            reason: approval.reason.clone(),
            key_id: approval.key.to_string(),
            create_time: Some(timestamp_to_proto(approval.at)),
        }),
        quarantine: tool.quarantine.as_ref().map(|quarantine| v1::ToolQuarantine {
            reason: quarantine.reason.clone(),
            key_id: quarantine.key.map(|key| key.to_string()).unwrap_or_default(),
            run_id: quarantine.run.map(|run| run.to_string()).unwrap_or_default(),
            create_time: Some(timestamp_to_proto(quarantine.at)),
        }),
    }
}

serve! {
    ToolService for Tools;
    call register_tool(RegisterToolRequest) -> RegisterToolResponse;
    call get_tool(GetToolRequest) -> GetToolResponse;
    call list_tools(ListToolsRequest) -> ListToolsResponse;
    call delete_tool(DeleteToolRequest) -> DeleteToolResponse;
    call approve_tool_level(ApproveToolLevelRequest) -> ApproveToolLevelResponse;
    call quarantine_tool(QuarantineToolRequest) -> QuarantineToolResponse;
    call release_tool(ReleaseToolRequest) -> ReleaseToolResponse;
}
