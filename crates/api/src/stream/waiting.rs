//! When to report to a caller that its run waits for a worker, and why.

use std::time::Duration;

use codelia_store::{Run, Store, WaitReason};
use tokio::time::Instant;

/// A run that waits no longer than this is not worth a message.
const FIRST_REPORT: Duration = Duration::from_secs(1);
/// Between two reads of the reason.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The wait of one run, as one caller sees it.
#[derive(Debug)]
pub(crate) struct Wait {
    check_at: Instant,
    reported: Option<WaitReason>,
}

impl Default for Wait {
    fn default() -> Self {
        Self { check_at: Instant::now() + FIRST_REPORT, reported: None }
    }
}

impl Wait {
    /// The reason of the wait, if it is time to look at it and it has changed.
    pub(crate) async fn changed(
        &mut self,
        store: &Store,
        run: &Run,
    ) -> Result<Option<WaitReason>, codelia_store::Error> {
        if Instant::now() < self.check_at {
            return Ok(None);
        }
        self.check_at = Instant::now() + CHECK_INTERVAL;
        let reason = match store.run_wait_reason(run.id).await {
            // Lists may be slow; the run waits all the same.
            Err(error) if error.is_transient() => return Ok(None),
            reason => reason?.filter(|reason| Some(*reason) != self.reported),
        };
        self.reported = reason.or(self.reported);
        Ok(reason)
    }
}
