//! `AdminService`: tenants, keys, quotas, workers. An operator administers the installation, an
//! admin only its own tenant: other tenants look as if they did not exist.

use std::{sync::Arc, time::Duration};

use codelia_policy::{Limit, LimitsRequest, display_duration};
use codelia_proto::v1::{self, admin_service_server::AdminService};
use codelia_store::{Caller, DrainedBy, NewKey, Quotas, QuotasChange, Scope, Tenant, WorkerState};
use codelia_types::{KeyId, TenantId, WorkerId};
use time::OffsetDateTime;
use tonic::{Request, Response, Status};

use crate::{
    auth,
    context::Context,
    paging::Page,
    resource_name::{self, TenantName},
    status::ApiError,
    to_proto, validate,
};

/// The longest time that a tenant's runs may be allowed.
const MAX_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

/// The service.
#[derive(Debug)]
pub(crate) struct Admin {
    pub(crate) context: Arc<Context>,
}

/// Resolves a tenant name to a tenant that the caller may administer.
pub(crate) fn administered_tenant(caller: &Caller, name: TenantName) -> Result<TenantId, ApiError> {
    match name {
        TenantName::Own => Ok(caller.tenant.clone()),
        TenantName::Id(id) if id == caller.tenant || auth::has_scope(caller, Scope::Operator) => Ok(id),
        TenantName::Id(id) => Err(tenant_not_found(&id)),
    }
}

pub(crate) fn tenant_not_found(id: &TenantId) -> ApiError {
    ApiError::not_found("tenant", id)
}

fn quotas_change(wire: Option<v1::Quotas>) -> Result<QuotasChange, ApiError> {
    let wire = wire.unwrap_or_default();
    Ok(QuotasChange {
        sessions: validate::quota("quotas.sessions", wire.sessions)?,
        concurrent_runs: validate::quota("quotas.concurrent_runs", wire.concurrent_runs)?,
        queued_runs: validate::quota("quotas.queued_runs", wire.queued_runs)?,
        requests_per_second: validate::quota("quotas.requests_per_second", wire.requests_per_second)?,
        output_bytes: validate::quota("quotas.output_bytes", wire.output_bytes)?,
    })
}

/// The change that the mask selects; without a mask, of the fields that are set. A selected field
/// that is not set returns to its default.
fn masked_change(
    wire: Option<v1::Quotas>,
    mask: Option<prost_types::FieldMask>,
) -> Result<QuotasChange, ApiError> {
    const FIELDS: [&str; 5] =
        ["sessions", "concurrent_runs", "queued_runs", "requests_per_second", "output_bytes"];
    let change = quotas_change(wire)?;
    let paths = mask.unwrap_or_default().paths;
    if paths.is_empty() {
        return Ok(change);
    }
    if let Some(unknown) = paths.iter().find(|path| !FIELDS.contains(&path.as_str())) {
        let known = FIELDS.join(", ");
        return Err(ApiError::invalid(
            "update_mask",
            format!("unknown field {unknown:?}; known are {known}"),
        ));
    }
    let all = with_defaults(change);
    let selected = |name: &str, value| paths.iter().any(|path| path == name).then_some(value);
    Ok(QuotasChange {
        sessions: selected("sessions", all.sessions),
        concurrent_runs: selected("concurrent_runs", all.concurrent_runs),
        queued_runs: selected("queued_runs", all.queued_runs),
        requests_per_second: selected("requests_per_second", all.requests_per_second),
        output_bytes: selected("output_bytes", all.output_bytes),
    })
}

/// The highest limits of a tenant. An operator may choose any amount, but only times that clocks can
/// add.
fn max_limits(wire: Option<v1::Limits>) -> Result<LimitsRequest, ApiError> {
    let limits = validate::limits(wire)?;
    for (limit, time) in [(Limit::Timeout, limits.timeout), (Limit::CpuTime, limits.cpu_time)] {
        if time.is_some_and(|time| time > MAX_TIME) {
            return Err(ApiError::invalid(
                limit.field(),
                format!("maximum is {}", display_duration(MAX_TIME)),
            ));
        }
    }
    Ok(limits)
}

fn with_defaults(change: QuotasChange) -> Quotas {
    let defaults = Quotas::default();
    Quotas {
        sessions: change.sessions.unwrap_or(defaults.sessions),
        concurrent_runs: change.concurrent_runs.unwrap_or(defaults.concurrent_runs),
        queued_runs: change.queued_runs.unwrap_or(defaults.queued_runs),
        requests_per_second: change.requests_per_second.unwrap_or(defaults.requests_per_second),
        output_bytes: change.output_bytes.unwrap_or(defaults.output_bytes),
    }
}

/// The scopes of a new key, sorted and without duplicates; at least one.
fn scopes(numbers: &[i32]) -> Result<Vec<Scope>, ApiError> {
    let mut scopes = numbers.iter().map(|&number| scope(number)).collect::<Result<Vec<_>, _>>()?;
    scopes.sort_unstable();
    scopes.dedup();
    if scopes.is_empty() { Err(ApiError::invalid("scopes", "must not be empty")) } else { Ok(scopes) }
}

fn scope(number: i32) -> Result<Scope, ApiError> {
    match validate::enum_value("scopes", number)? {
        v1::Scope::Unspecified => Err(ApiError::invalid("scopes", "must not contain SCOPE_UNSPECIFIED")),
        v1::Scope::Run => Ok(Scope::Run),
        v1::Scope::Files => Ok(Scope::Files),
        v1::Scope::Approve => Ok(Scope::Approve),
        v1::Scope::Audit => Ok(Scope::Audit),
        v1::Scope::Admin => Ok(Scope::Admin),
        v1::Scope::Operator => Ok(Scope::Operator),
    }
}

/// When a new key expires; `None` for never.
fn expiry(wire: Option<prost_types::Timestamp>) -> Result<Option<OffsetDateTime>, ApiError> {
    match validate::time("expire_time", wire)? {
        Some(time) if time <= OffsetDateTime::now_utc() => {
            Err(ApiError::invalid("expire_time", "must be in the future"))
        }
        time => Ok(time),
    }
}

/// Callers can only grant scopes that they have; operators can grant all.
fn check_grant(caller: &Caller, scopes: &[Scope]) -> Result<(), ApiError> {
    scopes.iter().try_for_each(|&scope| auth::require_any_scope(caller, &[scope, Scope::Operator]))
}

impl Admin {
    async fn create_tenant(
        &self,
        caller: &Caller,
        wire: v1::CreateTenantRequest,
    ) -> Result<v1::Tenant, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = wire.tenant_id.parse().ok().filter(|id: &TenantId| id.as_str() != "-");
        let id = id.ok_or_else(|| {
            ApiError::invalid("tenant_id", "must match `[a-z0-9-]{1,63}` and must not be `-`")
        })?;
        let quotas = with_defaults(quotas_change(wire.quotas)?);
        match self.context.store.tenant_create(&id, quotas).await {
            Ok(tenant) => self.with_usage(&tenant).await,
            Err(codelia_store::Error::AlreadyExists { .. }) => Err(ApiError::TenantExists),
            Err(error) => Err(error.into()),
        }
    }

    async fn get_tenant(&self, caller: &Caller, name: &str) -> Result<v1::Tenant, ApiError> {
        let id = administered_tenant(caller, resource_name::tenant("name", name)?)?;
        let tenant = self.context.store.tenant_get(&id).await?.ok_or_else(|| tenant_not_found(&id))?;
        self.with_usage(&tenant).await
    }

    pub(crate) async fn with_usage(&self, tenant: &Tenant) -> Result<v1::Tenant, ApiError> {
        let used = self.context.store.tenant_usage(&tenant.id).await?;
        Ok(to_proto::tenant(tenant, Some(used)))
    }

    /// The list has no usage: it would take a query for each tenant.
    async fn list_tenants(
        &self,
        caller: &Caller,
        wire: v1::ListTenantsRequest,
    ) -> Result<v1::ListTenantsResponse, ApiError> {
        let mut page = Page::<TenantId, _>::parse(&caller.tenant, &wire)?;
        let store = &self.context.store;
        while let Some(limit) = page.batch() {
            let rows = if auth::has_scope(caller, Scope::Operator) {
                store.tenant_list_any_tenant(page.after.as_ref(), limit).await?
            } else {
                let own = store.tenant_get(&caller.tenant).await?;
                own.into_iter()
                    .filter(|tenant| page.after.as_ref().is_none_or(|after| tenant.id > *after))
                    .collect()
            };
            page.add(rows, |tenant| (tenant.id.clone(), to_proto::tenant(&tenant, None)));
        }
        let (tenants, next_page_token) = page.finish();
        Ok(v1::ListTenantsResponse { tenants, next_page_token })
    }

    async fn update_quotas(
        &self,
        caller: &Caller,
        wire: v1::UpdateQuotasRequest,
    ) -> Result<v1::Tenant, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let change = masked_change(wire.quotas, wire.update_mask)?;
        let tenant = self.context.store.tenant_set_quotas(&id, change).await?;
        self.with_usage(&tenant.ok_or_else(|| tenant_not_found(&id))?).await
    }

    async fn set_isolation_floor(
        &self,
        caller: &Caller,
        wire: v1::SetIsolationFloorRequest,
    ) -> Result<v1::Tenant, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let level = validate::enum_value::<v1::IsolationLevel>("level", wire.level)?.to_level();
        let level = level.ok_or_else(|| ApiError::invalid("level", "required"))?;
        let ask = validate::enum_value::<v1::IsolationLevel>("ask_level", wire.ask_level)?.to_level();
        if ask.is_some_and(|ask| ask >= level) {
            return Err(ApiError::invalid("ask_level", format!("must be below level, which is {level}")));
        }
        let reason = validate::reason(wire.reason)?;
        let store = &self.context.store;
        let tenant = store.tenant_set_floor(&id, (level, ask), &reason, Some(caller.key)).await?;
        self.with_usage(&tenant.ok_or_else(|| tenant_not_found(&id))?).await
    }

    async fn set_max_limits(
        &self,
        caller: &Caller,
        wire: v1::SetMaxLimitsRequest,
    ) -> Result<v1::Tenant, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let max = max_limits(wire.limits)?;
        let tenant = self.context.store.tenant_set_max_limits(&id, &max).await?;
        self.with_usage(&tenant.ok_or_else(|| tenant_not_found(&id))?).await
    }

    async fn create_key(
        &self,
        caller: &Caller,
        wire: v1::CreateKeyRequest,
    ) -> Result<v1::CreateKeyResponse, ApiError> {
        let tenant = administered_tenant(caller, resource_name::tenant("parent", &wire.parent)?)?;
        let display_name = validate::display_name(wire.display_name)?;
        let scopes = scopes(&wire.scopes)?;
        check_grant(caller, &scopes)?;
        let expires_at = expiry(wire.expire_time)?;
        let (secret, secret_hash) = auth::generate_secret();
        let (tenant, display_name, scopes) = (&tenant, &display_name, &scopes);
        let new = NewKey { tenant, display_name, secret_hash, scopes, expires_at };
        let key = self.context.store.key_create(new).await?.ok_or_else(|| tenant_not_found(tenant))?;
        Ok(v1::CreateKeyResponse { key: Some(to_proto::key(key)), secret })
    }

    async fn list_keys(
        &self,
        caller: &Caller,
        wire: v1::ListKeysRequest,
    ) -> Result<v1::ListKeysResponse, ApiError> {
        let tenant = administered_tenant(caller, resource_name::tenant("parent", &wire.parent)?)?;
        let mut page = Page::<KeyId, _>::parse(&caller.tenant, &wire)?;
        let store = &self.context.store;
        store.tenant_get(&tenant).await?.ok_or_else(|| tenant_not_found(&tenant))?;
        while let Some(limit) = page.batch() {
            let rows = store.key_list(&tenant, page.after, limit).await?;
            page.add(rows, |key| (key.id, to_proto::key(key)));
        }
        let (keys, next_page_token) = page.finish();
        Ok(v1::ListKeysResponse { keys, next_page_token })
    }

    async fn revoke_key(&self, caller: &Caller, name: &str) -> Result<v1::Key, ApiError> {
        let (tenant, id) = resource_name::key("name", name)?;
        let tenant = administered_tenant(caller, tenant)?;
        let key = self.context.store.key_revoke(&tenant, id).await?;
        Ok(to_proto::key(key.ok_or_else(|| ApiError::not_found("key", id))?))
    }

    async fn list_workers(
        &self,
        caller: &Caller,
        wire: v1::ListWorkersRequest,
    ) -> Result<v1::ListWorkersResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let mut page = Page::<WorkerId, _>::parse(&caller.tenant, &wire)?;
        while let Some(limit) = page.batch() {
            let rows = self.context.store.worker_list(page.after.as_ref(), limit).await?;
            page.add(rows, |worker| (worker.id.clone(), to_proto::worker(worker)));
        }
        let (workers, next_page_token) = page.finish();
        Ok(v1::ListWorkersResponse { workers, next_page_token })
    }

    async fn drain_worker(&self, caller: &Caller, name: &str) -> Result<v1::Worker, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::worker("name", name)?;
        let worker = self.context.store.worker_drain(&id, DrainedBy::Operator).await?;
        Ok(to_proto::worker(worker.ok_or_else(|| ApiError::not_found("worker", &id))?))
    }

    async fn undrain_worker(&self, caller: &Caller, name: &str) -> Result<v1::Worker, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::worker("name", name)?;
        let worker = self.context.store.worker_undrain(&id).await?;
        match worker.ok_or_else(|| ApiError::not_found("worker", &id))? {
            worker if worker.state == WorkerState::Draining => Err(ApiError::WorkerDrainsItself),
            worker => Ok(to_proto::worker(worker)),
        }
    }
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
    use codelia_policy::IsolationLevel;

    use super::*;

    fn caller_with(scopes: &[Scope]) -> Caller {
        Caller {
            key: KeyId::generate(),
            tenant: "own".parse().unwrap(),
            scopes: scopes.to_vec(),
            quotas: Quotas::default(),
            max_limits: LimitsRequest::default(),
            floor: IsolationLevel::Full,
            ask_floor: None,
            policy_version: None,
        }
    }

    #[test]
    fn admin_sees_only_own_tenant() {
        let other = || TenantName::Id("other".parse().unwrap());
        let admin = caller_with(&[Scope::Admin]);
        assert_eq!(administered_tenant(&admin, TenantName::Own).unwrap().as_str(), "own");
        let not_found = ApiError::not_found("tenant", "other");
        assert_eq!(administered_tenant(&admin, other()), Err(not_found));
        assert_eq!(administered_tenant(&caller_with(&[Scope::Operator]), other()).unwrap().as_str(), "other");
    }

    #[test]
    fn only_operator_grants_scopes_it_lacks() {
        let admin = caller_with(&[Scope::Admin, Scope::Run]);
        assert!(check_grant(&admin, &[Scope::Run]).is_ok());
        assert_eq!(
            check_grant(&admin, &[Scope::Files]),
            Err(ApiError::ScopeMissing { any_of: vec!["files", "operator"] })
        );
        assert!(check_grant(&caller_with(&[Scope::Operator]), &[Scope::Audit]).is_ok());
    }

    #[test]
    fn scopes_are_known_and_not_empty() {
        for bad in [&[][..], &[0], &[99], &[1, -1]] {
            assert!(matches!(scopes(bad), Err(ApiError::InvalidField { field, .. }) if field == "scopes"));
        }
        assert_eq!(scopes(&[5, 1, 5]), Ok(vec![Scope::Run, Scope::Admin]));
    }

    #[test]
    fn update_mask_selects_fields_and_unsets_them() {
        let mask = |paths: &[&str]| {
            Some(prost_types::FieldMask { paths: paths.iter().map(ToString::to_string).collect() })
        };
        let five = Some(v1::Quotas { sessions: Some(5), queued_runs: Some(6), ..Default::default() });
        let change = masked_change(five, mask(&["sessions", "output_bytes"])).unwrap();
        let default = Quotas::default().output_bytes;
        let expected =
            QuotasChange { sessions: Some(5), output_bytes: Some(default), ..QuotasChange::default() };
        assert_eq!(change, expected);
        assert_eq!(masked_change(five, mask(&[])), quotas_change(five));
        let unknown = masked_change(five, mask(&["quotas.sessions"]));
        assert!(matches!(unknown, Err(ApiError::InvalidField { field, .. }) if field == "update_mask"));
    }

    #[test]
    fn zero_quota_is_rejected_and_absent_is_default() {
        let zero = v1::Quotas { queued_runs: Some(0), ..Default::default() };
        assert!(
            matches!(quotas_change(Some(zero)), Err(ApiError::InvalidField { field, .. }) if field == "quotas.queued_runs")
        );
        let five = v1::Quotas { sessions: Some(5), ..Default::default() };
        let quotas = with_defaults(quotas_change(Some(five)).unwrap());
        assert_eq!(quotas, Quotas { sessions: 5, ..Quotas::default() });
    }
}
