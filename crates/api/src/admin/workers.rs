//! Workers: listing, draining and undraining them.

use codelia_proto::v1;
use codelia_store::{Caller, DrainedBy, EventKind, Scope, WorkerState};
use codelia_types::{Reason, WorkerId};
use serde_json::json;

use super::{Admin, Change};
use crate::{
    auth,
    error::ApiError,
    wire::{paging::Page, resource_name, to_proto},
};

impl Admin {
    pub(super) async fn list_workers(
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

    pub(super) async fn drain_worker(
        &self,
        caller: &Caller,
        wire: v1::DrainWorkerRequest,
    ) -> Result<v1::DrainWorkerResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::worker("name", &wire.name)?;
        let worker = self.audited(caller, drain(&id, true), async {
            let worker = self.context.store.worker_drain(&id, DrainedBy::Operator).await?;
            worker.ok_or_else(|| ApiError::not_found("worker", &id))
        });
        Ok(v1::DrainWorkerResponse { worker: Some(to_proto::worker(worker.await?)) })
    }

    pub(super) async fn undrain_worker(
        &self,
        caller: &Caller,
        wire: v1::UndrainWorkerRequest,
    ) -> Result<v1::UndrainWorkerResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::worker("name", &wire.name)?;
        let worker = self.audited(caller, drain(&id, false), async {
            let worker = self.context.store.worker_undrain(&id).await?;
            match worker.ok_or_else(|| ApiError::not_found("worker", &id))? {
                worker if worker.state == WorkerState::Draining => Err(drains_itself()),
                worker => Ok(worker),
            }
        });
        Ok(v1::UndrainWorkerResponse { worker: Some(to_proto::worker(worker.await?)) })
    }
}

fn drain(id: &WorkerId, drain: bool) -> Change<'static> {
    let detail = json!({ "worker": id, "drain": drain });
    Change { kind: EventKind::WorkerDrained, tenant: None, detail }
}

fn drains_itself() -> ApiError {
    ApiError::new(
        Reason::WorkerDrainsItself,
        "the worker shuts down, or a sandbox left something behind; restart it",
    )
}
