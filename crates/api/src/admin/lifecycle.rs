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
    ) -> Result<v1::SuspendTenantResponse, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let tenant = self.context.store.tenant_suspend(&id, &reason, caller.key).await?;
        Ok(v1::SuspendTenantResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }

    pub(super) async fn resume_tenant(
        &self,
        caller: &Caller,
        wire: v1::ResumeTenantRequest,
    ) -> Result<v1::ResumeTenantResponse, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        let tenant = self.context.store.tenant_resume(&id, caller.key).await?;
        if tenant.as_ref().is_some_and(|tenant| tenant.deleted_at.is_some()) {
            return Err(ApiError::tenant_deleted());
        }
        Ok(v1::ResumeTenantResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }

    /// Returns no tenant if there is none and that is allowed.
    pub(super) async fn delete_tenant(
        &self,
        caller: &Caller,
        wire: v1::DeleteTenantRequest,
    ) -> Result<v1::DeleteTenantResponse, ApiError> {
        let id = other_tenant(caller, &wire.name)?;
        match self.context.store.tenant_delete(&id, wire.force, caller.key).await? {
            TenantDeletion::NotFound if wire.allow_missing => {
                Ok(v1::DeleteTenantResponse { tenant: None })
            }
            TenantDeletion::NotFound => Err(tenant_not_found(&id)),
            TenantDeletion::HasSessions(sessions) => {
                let message =
                    format!("the tenant has {sessions} open sessions; close them, or set `force`");
                Err(ApiError::new(Reason::TenantNotEmpty, message))
            }
            TenantDeletion::Begun(tenant) => {
                let tenant = Some(self.shown(Some(*tenant), &id).await?);
                Ok(v1::DeleteTenantResponse { tenant })
            }
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
