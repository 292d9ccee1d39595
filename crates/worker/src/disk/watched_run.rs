//! A run whose session is measured while its command runs.

use std::sync::Arc;

use codelia_backends::UsageReader;
use codelia_policy::Limit;
use codelia_types::SessionId;

use super::{Disk, run_watch::RunWatch};

/// A run that is watched until this is dropped.
#[derive(Debug)]
pub(crate) struct WatchedRun {
    pub(super) disk: Arc<Disk>,
    pub(super) session: SessionId,
    pub(super) run: Arc<RunWatch>,
}

impl WatchedRun {
    /// Adds how to list the processes of the run. Files that only they still have open count.
    pub(crate) fn started(&self, processes: Option<UsageReader>) {
        if let Some(reader) = processes {
            self.run.processes.get_or_init(|| reader);
        }
    }

    /// Waits until the run must be stopped, and returns the limit that was exceeded.
    pub(crate) async fn exceeded_limit(&self) -> Limit {
        self.run.stopped().await
    }
}

impl Drop for WatchedRun {
    fn drop(&mut self) {
        self.disk.end_run(self.session, &self.run);
    }
}
