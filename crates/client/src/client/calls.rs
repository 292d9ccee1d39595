//! Calls by their requests: which method takes a request, and what of the response is wanted.

use std::{future::Future, ops::ControlFlow};

use anyhow::{Context, Result};
use codelia_proto::v1;
use tonic::Status;

use super::Client;

/// Results that the server puts on a page at most.
const MAX_PAGE_SIZE: usize = 1000;

/// A request for one thing.
pub trait Call {
    /// The thing in the response.
    type Answer;

    /// Makes the call. Fails if the response is empty.
    fn send(self, client: &Client) -> impl Future<Output = Result<Self::Answer>> + Send;
}

/// A request for a page of a list.
pub trait List: Clone {
    /// A thing in the list.
    type Item;

    /// Requests the page that a token names, and returns its items and the next token: empty on the
    /// last page. `size` is the number of items at most.
    fn page(
        self,
        client: &Client,
        size: i32,
        token: String,
    ) -> impl Future<Output = Result<(Vec<Self::Item>, String), Status>> + Send;
}

macro_rules! calls {
    ($($service:ident.$method:ident($request:ident) -> $field:ident: $answer:ident;)+) => {$(
        impl Call for v1::$request {
            type Answer = v1::$answer;

            async fn send(self, client: &Client) -> Result<v1::$answer> {
                let response = client.$service().$method(self).await?.into_inner();
                let name = || stringify!($field).replace('_', " ");
                response.$field.with_context(|| format!("the server sent no {}", name()))
            }
        }
    )+};
}

macro_rules! lists {
    ($($service:ident.$method:ident($request:ident) -> $field:ident: $item:ident;)+) => {$(
        impl List for v1::$request {
            type Item = v1::$item;

            async fn page(
                self,
                client: &Client,
                page_size: i32,
                page_token: String,
            ) -> Result<(Vec<v1::$item>, String), Status> {
                #[allow(clippy::needless_update, reason = "some requests have no other field")]
                let request = v1::$request { page_size, page_token, ..self };
                let page = client.$service().$method(request).await?.into_inner();
                Ok((page.$field, page.next_page_token))
            }
        }
    )+};
}

calls! {
    sessions.create_session(CreateSessionRequest) -> session: Session;
    sessions.get_session(GetSessionRequest) -> session: Session;
    sessions.extend_session(ExtendSessionRequest) -> session: Session;
    sessions.update_session(UpdateSessionRequest) -> session: Session;
    sessions.release_session(ReleaseSessionRequest) -> session: Session;
    sessions.close_session(CloseSessionRequest) -> session: Session;
    runs.start_run(StartRunRequest) -> run: Run;
    runs.get_run(GetRunRequest) -> run: Run;
    runs.cancel_run(CancelRunRequest) -> run: Run;
    runs.signal_run(SignalRunRequest) -> run: Run;
    runs.apply_changes(ApplyChangesRequest) -> run: Run;
    runs.discard_changes(DiscardChangesRequest) -> run: Run;
    files.stat_file(StatFileRequest) -> file: File;
    files.make_directory(MakeDirectoryRequest) -> file: File;
    files.move_file(MoveFileRequest) -> file: File;
    approvals.get_approval(GetApprovalRequest) -> approval: Approval;
    approvals.decide_approval(DecideApprovalRequest) -> approval: Approval;
    approvals.revoke_approval(RevokeApprovalRequest) -> approval: Approval;
    policies.check_policy(CheckPolicyRequest) -> policy: Policy;
    policies.get_scope_policy(GetScopePolicyRequest) -> scope_policy: ScopePolicy;
    policies.set_scope_policy(SetScopePolicyRequest) -> scope_policy: ScopePolicy;
    policies.rollback_scope_policy(RollbackScopePolicyRequest) -> scope_policy: ScopePolicy;
    policies.delete_scope_policy(DeleteScopePolicyRequest) -> scope_policy: ScopePolicy;
    policies.get_profile(GetProfileRequest) -> profile: Profile;
    tools.get_tool(GetToolRequest) -> tool: Tool;
    tools.register_tool(RegisterToolRequest) -> tool: Tool;
    tools.approve_tool_level(ApproveToolLevelRequest) -> tool: Tool;
    tools.quarantine_tool(QuarantineToolRequest) -> tool: Tool;
    tools.release_tool(ReleaseToolRequest) -> tool: Tool;
    volumes.create_volume(CreateVolumeRequest) -> volume: Volume;
    volumes.get_volume(GetVolumeRequest) -> volume: Volume;
    flags.get_flag(GetFlagRequest) -> flag: Flag;
    flags.set_flag(SetFlagRequest) -> flag: Flag;
    flags.rollback_flag(RollbackFlagRequest) -> flag: Flag;
    info.get_server_info(GetServerInfoRequest) -> server_info: ServerInfo;
    admin.create_tenant(CreateTenantRequest) -> tenant: Tenant;
    admin.get_tenant(GetTenantRequest) -> tenant: Tenant;
    admin.update_quotas(UpdateQuotasRequest) -> tenant: Tenant;
    admin.set_max_limits(SetMaxLimitsRequest) -> tenant: Tenant;
    admin.set_retention(SetRetentionRequest) -> tenant: Tenant;
    admin.set_isolation_floor(SetIsolationFloorRequest) -> tenant: Tenant;
    admin.suspend_tenant(SuspendTenantRequest) -> tenant: Tenant;
    admin.resume_tenant(ResumeTenantRequest) -> tenant: Tenant;
    admin.delete_tenant(DeleteTenantRequest) -> tenant: Tenant;
    admin.revoke_key(RevokeKeyRequest) -> key: Key;
    admin.drain_worker(DrainWorkerRequest) -> worker: Worker;
    admin.undrain_worker(UndrainWorkerRequest) -> worker: Worker;
    admin.cancel_tenant_run(CancelTenantRunRequest) -> run: Run;
}

lists! {
    sessions.list_sessions(ListSessionsRequest) -> sessions: Session;
    runs.list_runs(ListRunsRequest) -> runs: Run;
    files.list_files(ListFilesRequest) -> files: File;
    approvals.list_approvals(ListApprovalsRequest) -> approvals: Approval;
    policies.list_projects(ListProjectsRequest) -> projects: ScopePolicy;
    policies.list_scope_policy_versions(ListScopePolicyVersionsRequest) -> versions: ScopePolicy;
    policies.dry_run_scope_policy(DryRunScopePolicyRequest) -> results: DryRunResult;
    audit.list_events(ListEventsRequest) -> events: AuditEvent;
    tools.list_tools(ListToolsRequest) -> tools: Tool;
    volumes.list_volumes(ListVolumesRequest) -> volumes: Volume;
    flags.list_flags(ListFlagsRequest) -> flags: Flag;
    flags.list_flag_history(ListFlagHistoryRequest) -> flags: Flag;
    admin.list_tenants(ListTenantsRequest) -> tenants: Tenant;
    admin.list_keys(ListKeysRequest) -> keys: Key;
    admin.list_workers(ListWorkersRequest) -> workers: Worker;
    admin.list_tenant_runs(ListTenantRunsRequest) -> tenant_runs: TenantRun;
}

impl Client {
    /// Makes a call and returns what it asks for.
    pub async fn call<R: Call>(&self, request: R) -> Result<R::Answer> {
        request.send(self).await
    }

    /// Collects at most `limit` items of a list.
    pub async fn list<R: List>(&self, request: R, limit: usize) -> Result<Vec<R::Item>> {
        let size = i32::try_from(limit.min(MAX_PAGE_SIZE))?;
        let mut items = Vec::new();
        let take = |page| {
            items.extend(page);
            Ok(if items.len() < limit { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        };
        each_page(async |token| request.clone().page(self, size, token).await, take).await?;
        items.truncate(limit);
        Ok(items)
    }

    /// Passes each page of a list to `take` until it has what it looks for.
    pub async fn each_page<R: List>(
        &self,
        request: R,
        take: impl FnMut(Vec<R::Item>) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        let size = i32::try_from(MAX_PAGE_SIZE)?;
        each_page(async |token| request.clone().page(self, size, token).await, take).await
    }
}

/// `fetch` takes a page token and returns the items and the next token.
async fn each_page<T>(
    mut fetch: impl AsyncFnMut(String) -> Result<(Vec<T>, String), Status>,
    mut take: impl FnMut(Vec<T>) -> Result<ControlFlow<()>>,
) -> Result<()> {
    let mut token = String::new();
    loop {
        let (page, next_token) = fetch(token).await?;
        if take(page)?.is_break() || next_token.is_empty() {
            return Ok(());
        }
        token = next_token;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn pages_stop_at_break_or_end() {
        let fetch = async |token: String| {
            let next = if token.len() < 3 { format!("{token}x") } else { String::new() };
            Ok((vec![token.len(); 2], next))
        };
        for (limit, expected) in [(3, &[0, 0, 1, 1][..]), (usize::MAX, &[0, 0, 1, 1, 2, 2, 3, 3])] {
            let mut items = Vec::new();
            let take = |page| {
                items.extend(page);
                Ok(if items.len() < limit {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                })
            };
            each_page(fetch, take).await.unwrap();
            assert_eq!(items, expected);
        }
    }
}
