//! `AdminService`: tenants with their keys, quotas and runs, and workers. An operator administers
//! the installation, an admin only its own tenant: other tenants look as if they did not exist.

mod keys;
mod lifecycle;
pub(crate) mod retention;
mod runs;
mod tenants;
mod workers;

use std::sync::Arc;

use codelia_proto::v1::admin_service_server::AdminService;
use codelia_store::{Caller, EventBody, EventKind, EventSubject, Scope};
use codelia_types::TenantId;
use serde_json::{Value, json};

use crate::{auth, context::Context, error::ApiError, rpc::serve, wire::resource_name::TenantName};

/// Answers the calls of the service, with the state that all of them share.
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

serve! {
    AdminService for Admin;
    call create_tenant(CreateTenantRequest) -> CreateTenantResponse;
    call get_tenant(GetTenantRequest) -> GetTenantResponse;
    call list_tenants(ListTenantsRequest) -> ListTenantsResponse;
    call update_quotas(UpdateQuotasRequest) -> UpdateQuotasResponse;
    call set_isolation_floor(SetIsolationFloorRequest) -> SetIsolationFloorResponse;
    call set_max_limits(SetMaxLimitsRequest) -> SetMaxLimitsResponse;
    call set_retention(SetRetentionRequest) -> SetRetentionResponse;
    call suspend_tenant(SuspendTenantRequest) -> SuspendTenantResponse;
    call resume_tenant(ResumeTenantRequest) -> ResumeTenantResponse;
    call delete_tenant(DeleteTenantRequest) -> DeleteTenantResponse;
    call list_tenant_runs(ListTenantRunsRequest) -> ListTenantRunsResponse;
    call cancel_tenant_run(CancelTenantRunRequest) -> CancelTenantRunResponse;
    call create_key(CreateKeyRequest) -> CreateKeyResponse;
    call list_keys(ListKeysRequest) -> ListKeysResponse;
    call revoke_key(RevokeKeyRequest) -> RevokeKeyResponse;
    call list_workers(ListWorkersRequest) -> ListWorkersResponse;
    call drain_worker(DrainWorkerRequest) -> DrainWorkerResponse;
    call undrain_worker(UndrainWorkerRequest) -> UndrainWorkerResponse;
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
