//! Tenants: creating and listing them, their quotas, isolation floors and highest limits.

use std::time::Duration;

use codelia_policy::{Limit, LimitsRequest};
use codelia_proto::v1;
use codelia_store::{Caller, EventKind, Quotas, QuotasChange, Scope, Tenant};
use codelia_types::{Reason, TenantId, duration};
use serde_json::json;

use super::{Admin, Change, administered_tenant, tenant_not_found};
use crate::{
    auth,
    error::ApiError,
    wire::{paging::Page, resource_name, to_proto, validate},
};

/// The longest time that a tenant's runs may be allowed.
const MAX_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

impl Admin {
    pub(super) async fn create_tenant(
        &self,
        caller: &Caller,
        wire: v1::CreateTenantRequest,
    ) -> Result<v1::CreateTenantResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = wire.tenant_id.parse().ok().filter(|id: &TenantId| id.as_str() != "-");
        let id = id.ok_or_else(|| {
            ApiError::invalid("tenant_id", "must match `[a-z0-9-]{1,63}` and must not be `-`")
        })?;
        let quotas = with_defaults(quotas_change(wire.quotas)?);
        let change =
            Change { kind: EventKind::TenantCreated, tenant: Some(&id), detail: json!({}) };
        let tenant = self.audited(caller, change, async {
            self.context.store.tenant_create(&id, quotas).await.map_err(|error| match error {
                codelia_store::Error::AlreadyExists { .. } => {
                    let message = "tenant_id: already exists; choose another";
                    ApiError::new(Reason::TenantExists, message).with("field", "tenant_id")
                }
                error => error.into(),
            })
        });
        let tenant = Some(tenant.await?);
        Ok(v1::CreateTenantResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }

    pub(super) async fn get_tenant(
        &self,
        caller: &Caller,
        wire: v1::GetTenantRequest,
    ) -> Result<v1::GetTenantResponse, ApiError> {
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let tenant = self.context.store.tenant_get(&id).await?;
        Ok(v1::GetTenantResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }

    /// The tenant with what it uses. Fails if there is none.
    pub(super) async fn shown(
        &self,
        tenant: Option<Tenant>,
        id: &TenantId,
    ) -> Result<v1::Tenant, ApiError> {
        let tenant = tenant.ok_or_else(|| tenant_not_found(id))?;
        let used = self.context.store.tenant_usage(id).await?;
        Ok(to_proto::tenant(&tenant, Some(used)))
    }

    /// The list has no usage: it would take a query for each tenant.
    pub(super) async fn list_tenants(
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

    pub(super) async fn update_quotas(
        &self,
        caller: &Caller,
        wire: v1::UpdateQuotasRequest,
    ) -> Result<v1::UpdateQuotasResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let change = masked_change(wire.quotas, wire.update_mask)?;
        let detail = json!({ "quotas": change });
        let audited = Change { kind: EventKind::QuotasSet, tenant: Some(&id), detail };
        let tenant = self.audited(caller, audited, async {
            let tenant = self.context.store.tenant_set_quotas(&id, change).await?;
            tenant.ok_or_else(|| tenant_not_found(&id))
        });
        let tenant = Some(tenant.await?);
        Ok(v1::UpdateQuotasResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }

    pub(super) async fn set_isolation_floor(
        &self,
        caller: &Caller,
        wire: v1::SetIsolationFloorRequest,
    ) -> Result<v1::SetIsolationFloorResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let level = validate::enum_value::<v1::IsolationLevel>("level", wire.level)?.to_level();
        let level = level.ok_or_else(|| ApiError::invalid("level", "required"))?;
        let ask =
            validate::enum_value::<v1::IsolationLevel>("ask_level", wire.ask_level)?.to_level();
        if ask.is_some_and(|ask| ask >= level) {
            return Err(ApiError::invalid(
                "ask_level",
                format!("must be below level, which is {level}"),
            ));
        }
        let reason = validate::reason(wire.reason)?;
        let store = &self.context.store;
        let tenant = store.tenant_set_floor(&id, level, ask, &reason, Some(caller.key)).await?;
        Ok(v1::SetIsolationFloorResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }

    pub(super) async fn set_max_limits(
        &self,
        caller: &Caller,
        wire: v1::SetMaxLimitsRequest,
    ) -> Result<v1::SetMaxLimitsResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let max = max_limits(wire.limits)?;
        let detail = json!({ "max_limits": max });
        let change = Change { kind: EventKind::QuotasSet, tenant: Some(&id), detail };
        let tenant = self.audited(caller, change, async {
            let tenant = self.context.store.tenant_set_max_limits(&id, &max).await?;
            tenant.ok_or_else(|| tenant_not_found(&id))
        });
        let tenant = Some(tenant.await?);
        Ok(v1::SetMaxLimitsResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }
}

fn quotas_change(wire: Option<v1::Quotas>) -> Result<QuotasChange, ApiError> {
    let wire = wire.unwrap_or_default();
    Ok(QuotasChange {
        sessions: validate::quota("quotas.sessions", wire.sessions)?,
        concurrent_runs: validate::quota("quotas.concurrent_runs", wire.concurrent_runs)?,
        queued_runs: validate::quota("quotas.queued_runs", wire.queued_runs)?,
        requests_per_second: validate::quota(
            "quotas.requests_per_second",
            wire.requests_per_second,
        )?,
        output_bytes: validate::quota("quotas.output_bytes", wire.output_bytes)?,
        disk_bytes: validate::quota("quotas.disk_bytes", wire.disk_bytes)?,
    })
}

/// The change that the mask selects; without a mask, of the fields that are set. A selected field
/// that is not set returns to its default.
fn masked_change(
    wire: Option<v1::Quotas>,
    mask: Option<prost_types::FieldMask>,
) -> Result<QuotasChange, ApiError> {
    const FIELDS: [&str; 6] = [
        "sessions",
        "concurrent_runs",
        "queued_runs",
        "requests_per_second",
        "output_bytes",
        "disk_bytes",
    ];
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
        disk_bytes: selected("disk_bytes", all.disk_bytes),
    })
}

fn with_defaults(change: QuotasChange) -> Quotas {
    let defaults = Quotas::default();
    Quotas {
        sessions: change.sessions.unwrap_or(defaults.sessions),
        concurrent_runs: change.concurrent_runs.unwrap_or(defaults.concurrent_runs),
        queued_runs: change.queued_runs.unwrap_or(defaults.queued_runs),
        requests_per_second: change.requests_per_second.unwrap_or(defaults.requests_per_second),
        output_bytes: change.output_bytes.unwrap_or(defaults.output_bytes),
        disk_bytes: change.disk_bytes.unwrap_or(defaults.disk_bytes),
    }
}

/// The highest limits of a tenant. An operator may choose any amount, but only times that clocks
/// can add.
fn max_limits(wire: Option<v1::Limits>) -> Result<LimitsRequest, ApiError> {
    let limits = validate::limits(wire)?;
    for (limit, time) in [(Limit::Timeout, limits.timeout), (Limit::CpuTime, limits.cpu_time)] {
        if time.is_some_and(|time| time > MAX_TIME) {
            return Err(ApiError::invalid(
                limit.field(),
                format!("maximum is {}", duration::text(MAX_TIME)),
            ));
        }
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn update_mask_selects_fields_and_unsets_them() {
        let mask = |paths: &[&str]| {
            Some(prost_types::FieldMask { paths: paths.iter().map(ToString::to_string).collect() })
        };
        let five =
            Some(v1::Quotas { sessions: Some(5), queued_runs: Some(6), ..Default::default() });
        let change = masked_change(five, mask(&["sessions", "output_bytes"])).unwrap();
        let default = Quotas::default().output_bytes;
        let expected = QuotasChange {
            sessions: Some(5),
            output_bytes: Some(default),
            ..QuotasChange::default()
        };
        assert_eq!(change, expected);
        assert_eq!(masked_change(five, mask(&[])), quotas_change(five));
        let unknown = masked_change(five, mask(&["quotas.sessions"]));
        assert!(unknown.is_err_and(|error| error.invalid_field() == Some("update_mask")));
    }

    #[test]
    fn zero_quota_is_rejected_and_absent_is_default() {
        let zero = v1::Quotas { queued_runs: Some(0), ..Default::default() };
        assert!(
            quotas_change(Some(zero))
                .is_err_and(|error| error.invalid_field() == Some("quotas.queued_runs"))
        );
        let five = v1::Quotas { sessions: Some(5), ..Default::default() };
        let quotas = with_defaults(quotas_change(Some(five)).unwrap());
        assert_eq!(quotas, Quotas { sessions: 5, ..Quotas::default() });
    }
}
