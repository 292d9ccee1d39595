//! Cancels a run: in the store, then at its worker.

use std::{sync::Arc, time::Duration};

use codelia_proto::duration_from_proto;
use codelia_store::{Cancellation, Run, RunState};
use codelia_telemetry::task;
use codelia_types::{RunId, TenantId};

use crate::{context::Context, error::ApiError, wire::validate};

/// The longest time from SIGTERM to SIGKILL that a caller may request.
const MAX_GRACE: Duration = Duration::from_secs(60);

/// Validates how a run is to be canceled. The reason may be empty; a grace of zero kills at once.
pub(crate) fn cancellation(
    reason: String,
    grace: Option<prost_types::Duration>,
) -> Result<Cancellation, ApiError> {
    let reason = if reason.is_empty() { None } else { Some(validate::reason(reason)?) };
    let grace = match grace.map(|grace| duration_from_proto(&grace)) {
        None => None,
        Some(Ok(grace)) if grace <= MAX_GRACE => Some(grace),
        Some(_) => {
            let range = format!("must be 0 to {} seconds", MAX_GRACE.as_secs());
            return Err(ApiError::invalid("grace", range));
        }
    };
    Ok(Cancellation { reason, grace })
}

/// Requests the end of a run.
pub(crate) async fn cancel_run(
    context: &Arc<Context>,
    tenant: &TenantId,
    id: RunId,
    cancellation: &Cancellation,
) -> Result<Run, ApiError> {
    let run = context.store.run_cancel(tenant, id, cancellation).await?;
    let run = run.ok_or_else(|| ApiError::not_found("run", id))?;
    if let (RunState::Running, Some(address)) = (run.state, run.worker_address.clone()) {
        let context = context.clone();
        let grace = cancellation.grace;
        task::background("cancel", async move {
            context.worker_calls.cancel(&address, id, grace).await
        });
    }
    Ok(run)
}
