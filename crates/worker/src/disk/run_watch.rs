//! The limits of one run, which it may be stopped for.

use std::sync::OnceLock;

use codelia_policy::{DiskLimits, Limit};
use codelia_types::DiskUsage;
use tokio_util::sync::CancellationToken;

/// A run whose session is watched.
#[derive(Debug)]
pub(crate) struct RunWatch {
    pub(super) limits: DiskLimits,
    /// What the session used when the run started, as far as it was known. A run in a full session may
    /// delete files; it is stopped when the session grows.
    pub(super) at_start: OnceLock<DiskUsage>,
    exceeded: OnceLock<Limit>,
    stop: CancellationToken,
}

impl RunWatch {
    pub(super) fn new(limits: DiskLimits, at_start: Option<DiskUsage>) -> Self {
        let known = OnceLock::new();
        if let Some(usage) = at_start {
            known.get_or_init(|| usage);
        }
        Self { limits, at_start: known, exceeded: OnceLock::new(), stop: CancellationToken::new() }
    }

    /// Waits until the run must be stopped, and returns the limit that was exceeded.
    pub(crate) async fn exceeded(&self) -> Limit {
        self.stop.cancelled().await;
        self.exceeded.get().copied().unwrap_or(Limit::DiskBytes)
    }

    /// Has the run stopped.
    pub(super) fn stop(&self, limit: Limit) {
        self.exceeded.get_or_init(|| limit);
        self.stop.cancel();
    }
}
