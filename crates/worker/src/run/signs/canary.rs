//! Answers to canary files that were opened. The watch names the session: all its runs of the
//! moment are answerable.

use std::sync::{Arc, atomic::Ordering};

use super::escape::{self, Indicator};
use crate::{
    core::Core,
    sandbox::canary::{self, Canaries},
};

/// Answers for the runs of a worker for as long as it runs.
pub(crate) async fn follow(core: Arc<Core>, canaries: Arc<Canaries>) {
    loop {
        if let Err(error) = canaries.readable().await {
            tracing::error!(%error, "canary files can no longer be watched");
            return;
        }
        respond(&core).await;
    }
}

/// Answers to what was opened until now.
pub(crate) async fn respond(core: &Core) {
    let Some(canaries) = core.backends.canaries() else { return };
    let _responding = canaries.responding.lock().await;
    let opened = canaries.opened();
    if opened.is_empty() {
        return;
    }
    // One that is not launched has opened nothing.
    let runs = core.runs.all_active();
    for run in runs.into_iter().filter(|run| run.launched.load(Ordering::Acquire)) {
        let session = run.assigned.session;
        for (_, name) in opened.iter().filter(|(opened, _)| *opened == session) {
            let indicator = Indicator::of_canary(canary::path(name));
            escape::respond(&run, &core.options.escape, indicator).await;
        }
    }
}
