//! Decisions about the changes of a run that wait for one. The worker that holds the session makes
//! them.

use std::sync::Arc;

use codelia_store::{Caller, Run, SessionRef};
use codelia_types::{ChangesState, Reason};

use crate::{context::Context, error::ApiError, files::SessionRoute};

/// Applies or drops the changes of a run. Repeating a decision succeeds; another one does not
/// change it.
pub(crate) async fn decide(
    context: &Arc<Context>,
    caller: &Caller,
    run: Run,
    apply: bool,
) -> Result<Run, ApiError> {
    if state(&run) != Some(ChangesState::Held) {
        return decided(run, apply);
    }
    let route = SessionRoute {
        context: context.clone(),
        tenant: caller.tenant.clone(),
        session: SessionRef::Id(run.session),
        writes: apply,
    };
    route.decide_changes(run.id, apply, caller.key).await?;
    let found = route.context.store.run_get(&caller.tenant, run.id).await?;
    decided(found.ok_or_else(|| ApiError::not_found("run", run.id))?, apply)
}

fn decided(run: Run, apply: bool) -> Result<Run, ApiError> {
    let wanted = if apply { ChangesState::Applied } else { ChangesState::Dropped };
    match state(&run) {
        Some(state) if state == wanted => Ok(run),
        state => Err(ApiError::new(Reason::ChangesNotHeld, not_held(state))),
    }
}

fn state(run: &Run) -> Option<ChangesState> {
    Some(run.result()?.changes.as_ref()?.state)
}

fn not_held(state: Option<ChangesState>) -> &'static str {
    match state {
        None => {
            "the run has no list of changes: it has not ended, or was not started with `codelia run --hold`"
        }
        Some(ChangesState::Applied) => "the changes of the run are applied already",
        Some(ChangesState::Dropped) => {
            "the changes of the run are dropped: it failed, they were discarded, or they waited too long"
        }
        Some(ChangesState::Held) => {
            "the session does not hold the changes of the run any more; start it again"
        }
    }
}
