//! Answers to canary files that were opened. The watch names the session: all its runs of the
//! moment are answerable.

use std::sync::{Arc, atomic::Ordering};

use codelia_policy::EscapeOptions;
use tokio::sync::Mutex;

use super::escape::{self, Indicator};
use crate::{
    core::Core,
    sandbox::canary::{self, Canaries},
};

/// Answers for the runs of this worker.
#[derive(Debug)]
pub(crate) struct CanaryResponder {
    core: Arc<Core>,
    escape: Arc<EscapeOptions>,
    /// Held while a sign is answered, so that the end of a run waits for what was seen of it.
    responding: Mutex<()>,
}

impl CanaryResponder {
    pub(crate) fn new(core: Arc<Core>, escape: Arc<EscapeOptions>) -> Self {
        Self { core, escape, responding: Mutex::default() }
    }

    /// Answers for as long as the worker runs.
    pub(crate) async fn run(self: Arc<Self>, canaries: Arc<Canaries>) {
        loop {
            if let Err(error) = canaries.readable().await {
                tracing::error!(%error, "canary files can no longer be watched");
                return;
            }
            self.respond().await;
        }
    }

    /// Answers to what was opened until now.
    pub(crate) async fn respond(&self) {
        let Some(canaries) = self.core.backends.canaries() else { return };
        let _responding = self.responding.lock().await;
        let opened = canaries.opened();
        if opened.is_empty() {
            return;
        }
        // One that is not launched has opened nothing.
        let runs = self.core.runs.all_active();
        for run in runs.into_iter().filter(|run| run.launched.load(Ordering::Acquire)) {
            let session = run.assigned.session;
            for (_, name) in opened.iter().filter(|(opened, _)| *opened == session) {
                escape::respond(&run, &self.escape, Indicator::of_canary(canary::path(name))).await;
            }
        }
    }
}
