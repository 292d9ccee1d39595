//! `AdminService`: tenants with their keys, quotas and runs, and workers. An operator administers
//! the installation, an admin only its own tenant: other tenants look as if they did not exist.

mod keys;
mod lifecycle;
pub(crate) mod retention;
mod runs;
mod tenants;
mod workers;

use std::sync::Arc;

use codelia_proto::v1::{self, admin_service_server::AdminService};
use codelia_store::{Caller, EventBody, EventKind, EventSubject, Scope};
use codelia_types::TenantId;
use serde_json::{Value, json};
use tonic::{Request, Response, Status};

use crate::{auth, context::Context, error::ApiError, wire::resource_name::TenantName};

/// The service.
#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) context: Arc<Context>,
}

/// A change that the audit records twice.
struct Change<'a> {
    kind: EventKind,
    tenant: Option<&'a TenantId>,
    detail: Value,
}

impl Admin {
    /// Records what a caller is about to do, does it, and records what became of it. Without the
    /// first record nothing is done. Without the second, the first says that it may have been done.
    async fn audited<T>(
        &self,
        caller: &Caller,
        change: Change<'_>,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        self.audit(caller, &change, "begun").await?;
        let result = work.await;
        let reason = result.as_ref().map_or_else(|error| error.reason().as_str(), |_| "done");
        if let Err(error) = self.audit(caller, &change, reason).await {
            tracing::warn!(%error, kind = change.kind.as_str(), "cannot record the result of a change");
        }
        result
    }

    async fn audit(
        &self,
        caller: &Caller,
        change: &Change<'_>,
        result: &str,
    ) -> Result<(), ApiError> {
        let Change { kind, tenant, detail } = change;
        let mut detail = detail.clone();
        detail["result"] = json!(result);
        let subject = EventSubject {
            key: Some(caller.key),
            tenant: tenant.cloned(),
            ..EventSubject::default()
        };
        let body = EventBody { kind: *kind, field: None, detail };
        Ok(self.context.store.audit_insert(&subject, &body).await?)
    }
}

/// Resolves a tenant name to a tenant that the caller may administer.
pub(crate) fn administered_tenant(caller: &Caller, name: TenantName) -> Result<TenantId, ApiError> {
    match name {
        TenantName::Own => Ok(caller.tenant.clone()),
        TenantName::Id(id) if id == caller.tenant || auth::has_scope(caller, Scope::Operator) => {
            Ok(id)
        }
        TenantName::Id(id) => Err(tenant_not_found(&id)),
    }
}

pub(crate) fn tenant_not_found(id: &TenantId) -> ApiError {
    ApiError::not_found("tenant", id)
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn create_tenant(
        &self,
        request: Request<v1::CreateTenantRequest>,
    ) -> Result<Response<v1::CreateTenantResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.create_tenant(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::CreateTenantResponse { tenant: Some(tenant) }))
    }

    async fn get_tenant(
        &self,
        request: Request<v1::GetTenantRequest>,
    ) -> Result<Response<v1::GetTenantResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.get_tenant(&caller, &request.into_inner().name).await?;
        Ok(Response::new(v1::GetTenantResponse { tenant: Some(tenant) }))
    }

    async fn list_tenants(
        &self,
        request: Request<v1::ListTenantsRequest>,
    ) -> Result<Response<v1::ListTenantsResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.list_tenants(&caller, request.into_inner()).await?))
    }

    async fn update_quotas(
        &self,
        request: Request<v1::UpdateQuotasRequest>,
    ) -> Result<Response<v1::UpdateQuotasResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.update_quotas(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::UpdateQuotasResponse { tenant: Some(tenant) }))
    }

    async fn set_isolation_floor(
        &self,
        request: Request<v1::SetIsolationFloorRequest>,
    ) -> Result<Response<v1::SetIsolationFloorResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.set_isolation_floor(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::SetIsolationFloorResponse { tenant: Some(tenant) }))
    }

    async fn set_max_limits(
        &self,
        request: Request<v1::SetMaxLimitsRequest>,
    ) -> Result<Response<v1::SetMaxLimitsResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = self.set_max_limits(&caller, request.into_inner()).await?;
        Ok(Response::new(v1::SetMaxLimitsResponse { tenant: Some(tenant) }))
    }

    async fn set_retention(
        &self,
        request: Request<v1::SetRetentionRequest>,
    ) -> Result<Response<v1::SetRetentionResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let tenant = Some(self.set_retention(&caller, request.into_inner()).await?);
        Ok(Response::new(v1::SetRetentionResponse { tenant }))
    }

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

    async fn create_key(
        &self,
        request: Request<v1::CreateKeyRequest>,
    ) -> Result<Response<v1::CreateKeyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.create_key(&caller, request.into_inner()).await?))
    }

    async fn list_keys(
        &self,
        request: Request<v1::ListKeysRequest>,
    ) -> Result<Response<v1::ListKeysResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.list_keys(&caller, request.into_inner()).await?))
    }

    async fn revoke_key(
        &self,
        request: Request<v1::RevokeKeyRequest>,
    ) -> Result<Response<v1::RevokeKeyResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let key = self.revoke_key(&caller, &request.into_inner().name).await?;
        Ok(Response::new(v1::RevokeKeyResponse { key: Some(key) }))
    }

    async fn list_workers(
        &self,
        request: Request<v1::ListWorkersRequest>,
    ) -> Result<Response<v1::ListWorkersResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        Ok(Response::new(self.list_workers(&caller, request.into_inner()).await?))
    }

    async fn drain_worker(
        &self,
        request: Request<v1::DrainWorkerRequest>,
    ) -> Result<Response<v1::DrainWorkerResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let worker = self.drain_worker(&caller, &request.into_inner().name).await?;
        Ok(Response::new(v1::DrainWorkerResponse { worker: Some(worker) }))
    }

    async fn undrain_worker(
        &self,
        request: Request<v1::UndrainWorkerRequest>,
    ) -> Result<Response<v1::UndrainWorkerResponse>, Status> {
        let caller = auth::caller(request.extensions())?;
        let worker = self.undrain_worker(&caller, &request.into_inner().name).await?;
        Ok(Response::new(v1::UndrainWorkerResponse { worker: Some(worker) }))
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{IsolationLevel, LimitsRequest};
    use codelia_store::Quotas;
    use codelia_types::KeyId;

    use super::*;

    pub(super) fn caller_with(scopes: &[Scope]) -> Caller {
        Caller {
            key: KeyId::generate(),
            tenant: "own".parse().unwrap(),
            scopes: scopes.to_vec(),
            quotas: Quotas::default(),
            max_limits: LimitsRequest::default(),
            floor: IsolationLevel::Full,
            ask_floor: None,
            policy_version: None,
            tools_version: 0,
        }
    }

    #[test]
    fn admin_sees_only_own_tenant() {
        let other = || TenantName::Id("other".parse().unwrap());
        let admin = caller_with(&[Scope::Admin]);
        assert_eq!(administered_tenant(&admin, TenantName::Own).unwrap().as_str(), "own");
        let not_found = ApiError::not_found("tenant", "other");
        assert_eq!(administered_tenant(&admin, other()), Err(not_found));
        assert_eq!(
            administered_tenant(&caller_with(&[Scope::Operator]), other()).unwrap().as_str(),
            "other"
        );
    }
}
