//! What a running run uses at this moment: the worker that executes it reads that for one request.

use codelia_proto::internal::v1::GetRunUsageResponse;
use codelia_store::{Run, RunState};

use crate::{context::Context, error::ApiError};

fn unavailable(why: &str) -> GetRunUsageResponse {
    let [unavailable, processes_unavailable] = [why.to_owned(), why.to_owned()];
    GetRunUsageResponse { unavailable, processes_unavailable, ..GetRunUsageResponse::default() }
}

/// Asks the worker that executes a run. If the run has ended meanwhile, reads it again.
pub(crate) async fn read(
    context: &Context,
    run: &mut Run,
    include_processes: bool,
) -> Result<GetRunUsageResponse, ApiError> {
    let (RunState::Running, Some(address)) = (run.state, run.worker_address.clone()) else {
        return Ok(not_running(run));
    };
    match context.worker_calls.usage(&address, run.id, include_processes).await {
        Ok(answer) => return Ok(answer),
        Err(error) if !error.is_unknown_run() => {
            tracing::warn!(%error, address, run = %run.id, "usage of the run not read");
            return Ok(unavailable("the worker that executes the run did not answer; try again"));
        }
        Err(_) => {}
    }
    if let Some(now) = context.store.run_get(&run.tenant, run.id).await? {
        *run = now;
    }
    Ok(not_running(run))
}

fn not_running(run: &Run) -> GetRunUsageResponse {
    unavailable(match run.state {
        RunState::Queued => "the run is queued",
        RunState::Running => "its worker does not execute the run yet, or any more",
        RunState::Ended => "the run has ended: `run.usage` is what it used",
    })
}
