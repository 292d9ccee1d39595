//! Cancels a run: in the store, then at its worker.

use std::sync::Arc;

use codelia_store::{Run, RunState};
use codelia_telemetry::task;
use codelia_types::{RunId, TenantId};

use crate::{context::Context, status::ApiError};

/// Requests the end of a run.
pub(crate) async fn cancel_run(
    context: &Arc<Context>,
    tenant: &TenantId,
    id: RunId,
) -> Result<Run, ApiError> {
    let run = context.store.run_cancel(tenant, id).await?;
    let run = run.ok_or_else(|| ApiError::not_found("run", id))?;
    if let (RunState::Running, Some(address)) = (run.state, run.worker_address.clone()) {
        let context = context.clone();
        task::background("cancel", async move { context.dispatch.cancel(&address, id).await });
    }
    Ok(run)
}
