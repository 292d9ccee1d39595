//! The end of tenants: suspending, resuming and deleting them.

use codelia_proto::v1;
use codelia_store::{Caller, TenantDeletion};
use codelia_types::{Reason, TenantId};

use super::{Admin, tenant_not_found};
use crate::{
    error::ApiError,
    wire::{
        resource_name::{self, TenantName},
        validate,
    },
};

impl Admin {
    pub(super) async fn suspend_tenant(
        &self,
        caller: &Caller,
        wire: v1::SuspendTenantRequest,
    ) -> Result<v1::Tenant, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let tenant = self.context.store.tenant_suspend(&id, &reason, caller.key).await?;
        self.with_usage(&tenant.ok_or_else(|| tenant_not_found(&id))?).await
    }

    pub(super) async fn resume_tenant(
        &self,
        caller: &Caller,
        wire: v1::ResumeTenantRequest,
    ) -> Result<v1::Tenant, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        let tenant = self.context.store.tenant_resume(&id, caller.key).await?;
        let tenant = tenant.ok_or_else(|| tenant_not_found(&id))?;
        if tenant.deleted_at.is_some() {
            return Err(ApiError::tenant_deleted());
        }
        self.with_usage(&tenant).await
    }

    /// Returns the tenant, or `None` if there is none and that is allowed.
    pub(super) async fn delete_tenant(
        &self,
        caller: &Caller,
        wire: v1::DeleteTenantRequest,
    ) -> Result<Option<v1::Tenant>, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        match self.context.store.tenant_delete(&id, wire.force, caller.key).await? {
            TenantDeletion::NotFound if wire.allow_missing => Ok(None),
            TenantDeletion::NotFound => Err(tenant_not_found(&id)),
            TenantDeletion::HasSessions(sessions) => {
                let message =
                    format!("the tenant has {sessions} open sessions; close them, or set `force`");
                Err(ApiError::new(Reason::TenantNotEmpty, message))
            }
            TenantDeletion::Begun(tenant) => self.with_usage(&tenant).await.map(Some),
        }
    }
}

/// Parses the name of a tenant that the caller does not belong to: an operator must not lock itself
/// out.
fn other_tenant(caller: &Caller, name: &str) -> Result<TenantId, ApiError> {
    match resource_name::tenant("name", name)? {
        TenantName::Id(id) if id != caller.tenant => Ok(id),
        TenantName::Id(_) | TenantName::Own => Err(ApiError::invalid(
            "name",
            "is the tenant of your own key; use a key of another tenant",
        )),
    }
}
