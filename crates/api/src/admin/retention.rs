//! How long the rows of a tenant are kept.

use std::time::Duration;

use codelia_proto::v1;
use codelia_store::{Caller, Scope, TenantRetention};

use super::{Admin, administered_tenant};
use crate::{
    auth,
    error::ApiError,
    wire::{resource_name, validate},
};

impl Admin {
    pub(super) async fn set_retention(
        &self,
        caller: &Caller,
        wire: v1::SetRetentionRequest,
    ) -> Result<v1::SetRetentionResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = administered_tenant(caller, resource_name::tenant("name", &wire.name)?)?;
        let retention = from_proto(wire.retention.unwrap_or_default())?;
        let all = retention.within(&self.context.options.retention);
        all.check().map_err(|error| ApiError::invalid(error.key, error.message))?;
        let tenant = self.context.store.tenant_set_retention(&id, &retention, caller.key).await?;
        Ok(v1::SetRetentionResponse { tenant: Some(self.shown(tenant, &id).await?) })
    }
}

fn from_proto(wire: v1::Retention) -> Result<TenantRetention, ApiError> {
    let time = |field, wire| validate::ttl(field, wire, Duration::MAX);
    Ok(TenantRetention {
        runs: time("retention.runs", wire.runs)?,
        output: time("retention.output", wire.output)?,
        audit: time("retention.audit", wire.audit)?,
    })
}
