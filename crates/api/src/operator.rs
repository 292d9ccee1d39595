//! `OperatorService`: what operators do to tenants and their runs. The auth layer requires the scope;
//! every call is recorded as an event.

use std::sync::Arc;

use codelia_proto::v1::{self, operator_service_server::OperatorService};
use codelia_store::{Caller, EventBody, EventKind, EventSubject, Tenant, TenantDeletion};
use codelia_types::{RunId, TenantId};
use serde_json::json;
use tonic::{Request, Response, Status};

use crate::{
    auth,
    cancel::{cancel_run, cancellation},
    context::Context,
    paging::Page,
    resource_name::{self, TenantName},
    status::ApiError,
    to_proto, validate,
};

/// The service.
#[derive(Debug)]
pub(crate) struct Operator {
    pub(crate) context: Arc<Context>,
}

pub(crate) fn tenant_not_found(id: &TenantId) -> ApiError {
    ApiError::not_found("tenant", id)
}

/// Parses the name of a tenant that the caller does not belong to: an operator must not lock itself
/// out.
fn other_tenant(caller: &Caller, name: &str) -> Result<TenantId, ApiError> {
    match resource_name::tenant("name", name)? {
        TenantName::Id(id) if id != caller.tenant => Ok(id),
        TenantName::Id(_) | TenantName::Own => {
            Err(ApiError::invalid("name", "is the tenant of your own key; use a key of another tenant"))
        }
    }
}

impl Operator {
    async fn suspend_tenant(
        &self,
        caller: &Caller,
        wire: v1::SuspendTenantRequest,
    ) -> Result<v1::Tenant, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let tenant = self.context.store.tenant_suspend(&id, &reason, caller.key).await?;
        self.shown(&tenant.ok_or_else(|| tenant_not_found(&id))?).await
    }

    async fn resume_tenant(
        &self,
        caller: &Caller,
        wire: v1::ResumeTenantRequest,
    ) -> Result<v1::Tenant, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        let tenant = self.context.store.tenant_resume(&id, caller.key).await?;
        let tenant = tenant.ok_or_else(|| tenant_not_found(&id))?;
        if tenant.deleted_at.is_some() {
            return Err(ApiError::TenantDeleted);
        }
        self.shown(&tenant).await
    }

    /// Returns the tenant, or `None` if there is none and that is allowed.
    async fn delete_tenant(
        &self,
        caller: &Caller,
        wire: v1::DeleteTenantRequest,
    ) -> Result<Option<v1::Tenant>, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        match self.context.store.tenant_delete(&id, wire.force, caller.key).await? {
            TenantDeletion::NotFound if wire.allow_missing => Ok(None),
            TenantDeletion::NotFound => Err(tenant_not_found(&id)),
            TenantDeletion::HasSessions(sessions) => Err(ApiError::TenantNotEmpty { sessions }),
            TenantDeletion::Begun(tenant) => self.shown(&tenant).await.map(Some),
        }
    }

    async fn shown(&self, tenant: &Tenant) -> Result<v1::Tenant, ApiError> {
        let used = self.context.store.tenant_usage(&tenant.id).await?;
        Ok(to_proto::tenant(tenant, Some(used)))
    }

    async fn list_tenant_runs(
        &self,
        caller: &Caller,
        wire: v1::ListTenantRunsRequest,
    ) -> Result<v1::ListTenantRunsResponse, ApiError> {
        let tenant = match wire.tenant.as_str() {
            "" => None,
            name => match resource_name::tenant("tenant", name)? {
                TenantName::Id(id) => Some(id),
                TenantName::Own => Some(caller.tenant.clone()),
            },
        };
        let mut page = Page::<RunId, _>::parse(&caller.tenant, &wire)?;
        let store = &self.context.store;
        if let Some(id) = &tenant {
            store.tenant_get(id).await?.ok_or_else(|| tenant_not_found(id))?;
        }
        if wire.page_token.is_empty() {
            let subject =
                EventSubject { tenant: tenant.clone(), key: Some(caller.key), ..EventSubject::default() };
            let kind = EventKind::RunsListedByOperator;
            store.event_insert(&subject, &EventBody { kind, field: None, detail: json!({}) }).await?;
        }
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            let rows = store.run_list_active_any_tenant(tenant.as_ref(), page.after, limit).await?;
            page.add(rows, |run| {
                let tenant_id = run.tenant.to_string();
                let summary = to_proto::for_operator(&run, to_proto::run_summary(&run));
                (run.id, v1::TenantRun { tenant_id, run: Some(summary) })
            });
        }
        let (tenant_runs, next_page_token) = page.finish();
        Ok(v1::ListTenantRunsResponse { tenant_runs, next_page_token })
    }

    async fn cancel_tenant_run(
        &self,
        caller: &Caller,
        wire: v1::CancelTenantRunRequest,
    ) -> Result<v1::Run, ApiError> {
        let (tenant, id) = resource_name::tenant_run("name", &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let cancellation = cancellation(reason.clone(), wire.grace)?;
        let store = &self.context.store;
        let run = store.run_get(&tenant, id).await?.ok_or_else(|| ApiError::not_found("run", id))?;
        // First the event: nothing happens that is not recorded.
        let subject = EventSubject {
            tenant: Some(tenant.clone()),
            session: Some(run.session),
            run: Some(id),
            key: Some(caller.key),
            ..EventSubject::default()
        };
        let kind = EventKind::RunCanceledByOperator;
        let body = EventBody { kind, field: None, detail: json!({ "reason": reason }) };
        store.event_insert(&subject, &body).await?;
        let run = cancel_run(&self.context, &tenant, id, &cancellation).await?;
        Ok(to_proto::for_operator(&run, to_proto::run(&run)))
    }
}

#[tonic::async_trait]
impl OperatorService for Operator {
    async fn suspend_tenant(
        &self,
        request: Request<v1::SuspendTenantRequest>,
    ) -> Result<Response<v1::SuspendTenantResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.suspend_tenant(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::SuspendTenantResponse { tenant: Some(tenant) }))
    }

    async fn resume_tenant(
        &self,
        request: Request<v1::ResumeTenantRequest>,
    ) -> Result<Response<v1::ResumeTenantResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.resume_tenant(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::ResumeTenantResponse { tenant: Some(tenant) }))
    }

    async fn delete_tenant(
        &self,
        request: Request<v1::DeleteTenantRequest>,
    ) -> Result<Response<v1::DeleteTenantResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.delete_tenant(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::DeleteTenantResponse { tenant }))
    }

    async fn set_tenant_policy(
        &self,
        request: Request<v1::SetTenantPolicyRequest>,
    ) -> Result<Response<v1::SetTenantPolicyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let policy = self.set_policy(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::SetTenantPolicyResponse { tenant_policy: Some(policy) }))
    }

    async fn clear_tenant_policy(
        &self,
        request: Request<v1::ClearTenantPolicyRequest>,
    ) -> Result<Response<v1::ClearTenantPolicyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let policy = self.clear_policy(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::ClearTenantPolicyResponse { tenant_policy: Some(policy) }))
    }

    async fn get_tenant_policy(
        &self,
        request: Request<v1::GetTenantPolicyRequest>,
    ) -> Result<Response<v1::GetTenantPolicyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let policy = self.get_policy(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::GetTenantPolicyResponse { tenant_policy: Some(policy) }))
    }

    async fn list_tenant_runs(
        &self,
        request: Request<v1::ListTenantRunsRequest>,
    ) -> Result<Response<v1::ListTenantRunsResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.list_tenant_runs(&caller, request.into_inner()).await?))
    }

    async fn cancel_tenant_run(
        &self,
        request: Request<v1::CancelTenantRunRequest>,
    ) -> Result<Response<v1::CancelTenantRunResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let run = self.cancel_tenant_run(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::CancelTenantRunResponse { run: Some(run) }))
    }
}
