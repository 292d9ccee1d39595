//! Runs of any tenant: listing and canceling them. Each call is recorded as an event.

use codelia_proto::v1;
use codelia_store::{Caller, EventBody, EventKind, EventSubject};
use codelia_types::RunId;
use serde_json::json;

use super::{Admin, tenant_not_found};
use crate::{
    error::ApiError,
    runs::cancel::{cancel_run, cancellation},
    wire::{
        paging::Page,
        resource_name::{self, TenantName},
        to_proto, validate,
    },
};

impl Admin {
    pub(super) async fn list_tenant_runs(
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
            let subject = EventSubject {
                tenant: tenant.clone(),
                key: Some(caller.key),
                ..EventSubject::default()
            };
            let kind = EventKind::RunsListedByOperator;
            store
                .audit_insert(&subject, &EventBody { kind, field: None, detail: json!({}) })
                .await?;
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

    pub(super) async fn cancel_tenant_run(
        &self,
        caller: &Caller,
        wire: v1::CancelTenantRunRequest,
    ) -> Result<v1::CancelTenantRunResponse, ApiError> {
        let (tenant, id) = resource_name::tenant_run("name", &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let cancellation = cancellation(reason.clone(), wire.grace)?;
        let store = &self.context.store;
        let run =
            store.run_get(&tenant, id).await?.ok_or_else(|| ApiError::not_found("run", id))?;
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
        store.audit_insert(&subject, &body).await?;
        let run = cancel_run(&self.context, &tenant, id, &cancellation).await?;
        let run = to_proto::for_operator(&run, to_proto::run(&run));
        Ok(v1::CancelTenantRunResponse { run: Some(run) })
    }
}
