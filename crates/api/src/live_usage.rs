//! What a running run uses at this moment: the worker that executes it reads that for one request.

use codelia_proto::v1;
use codelia_store::{Run, RunState};

use crate::{context::Context, status::ApiError};

/// What a run uses, or why that is not known.
#[derive(Debug, Default)]
pub(crate) struct LiveUsage {
    pub(crate) usage: Option<v1::LiveUsage>,
    /// Empty with a usage.
    pub(crate) unavailable: String,
}

impl LiveUsage {
    fn unavailable(why: impl Into<String>) -> Self {
        Self { usage: None, unavailable: why.into() }
    }
}

/// Asks the worker that executes a run. If the run has ended meanwhile, reads it again.
pub(crate) async fn of(context: &Context, run: &mut Run) -> Result<LiveUsage, ApiError> {
    let (RunState::Running, Some(address)) = (run.state, run.worker_address.clone()) else {
        return Ok(not_running(run));
    };
    match context.dispatch.usage(&address, run.id).await {
        Ok(answer) => return Ok(LiveUsage { usage: answer.usage, unavailable: answer.unavailable }),
        Err(error) if !error.is_unknown_run() => {
            tracing::warn!(%error, address, run = %run.id, "usage of the run not read");
            return Ok(LiveUsage::unavailable("the worker that executes the run did not answer; try again"));
        }
        Err(_) => {}
    }
    if let Some(now) = context.store.run_get(&run.tenant, run.id).await? {
        *run = now;
    }
    Ok(not_running(run))
}

fn not_running(run: &Run) -> LiveUsage {
    LiveUsage::unavailable(match run.state {
        RunState::Queued => "the run is queued",
        RunState::Running => "its worker does not execute the run yet, or any more",
        RunState::Ended => "the run has ended: `run.usage` is what it used",
    })
}
