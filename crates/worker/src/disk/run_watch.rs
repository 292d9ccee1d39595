//! The limits of one run, which it may be stopped for.

use std::sync::OnceLock;

use codelia_backends::UsageReader;
use codelia_policy::{DiskLimits, Limit};
use codelia_telemetry::{DiskCause, DiskEffect, metrics};
use codelia_types::DiskUsage;
use tokio_util::sync::CancellationToken;

/// How much a session above its limit may grow before a run is stopped. File systems allocate and
/// free some blocks on their own.
const SLACK: DiskUsage = DiskUsage { bytes: 1 << 20, inodes: 64 };

/// A run whose session is watched.
#[derive(Debug)]
pub(super) struct RunWatch {
    pub(super) limits: DiskLimits,
    /// Usage of the session when the run started, or at the first measurement after. A run in a
    /// full session may delete files; it is stopped when the session grows.
    pub(super) at_start: OnceLock<DiskUsage>,
    /// Lists its processes, once it has started.
    pub(super) processes: OnceLock<UsageReader>,
    exceeded: OnceLock<Limit>,
    stop: CancellationToken,
}

impl RunWatch {
    pub(super) fn new(limits: DiskLimits, at_start: Option<DiskUsage>) -> Self {
        let at_start = at_start.map(OnceLock::from).unwrap_or_default();
        Self {
            limits,
            at_start,
            processes: OnceLock::new(),
            exceeded: OnceLock::new(),
            stop: CancellationToken::new(),
        }
    }

    /// The usage that the session may have while this run goes.
    pub(super) fn allowed(&self) -> DiskUsage {
        let allowed = |limit: u64, at_start: u64, slack: u64| {
            if at_start > limit { at_start.saturating_add(slack) } else { limit }
        };
        let at_start = self.at_start.get().copied().unwrap_or_default();
        DiskUsage {
            bytes: allowed(self.limits.bytes, at_start.bytes, SLACK.bytes),
            inodes: allowed(self.limits.inodes, at_start.inodes, SLACK.inodes),
        }
    }

    /// The limit that the session exceeds with this usage.
    pub(super) fn exceeds(&self, usage: DiskUsage) -> Option<Limit> {
        self.at_start.get_or_init(|| usage);
        let allowed = self.allowed();
        let bytes = (usage.bytes > allowed.bytes).then_some(Limit::DiskBytes);
        bytes.or_else(|| (usage.inodes > allowed.inodes).then_some(Limit::Inodes))
    }

    /// Has the run stopped. Counts it once.
    pub(super) fn stop(&self, limit: Limit, cause: DiskCause) {
        if self.exceeded.set(limit).is_ok() {
            metrics().disk.limited(cause, DiskEffect::RunStopped);
        }
        self.stop.cancel();
    }

    /// Waits until the run must be stopped, and returns the limit that was exceeded.
    pub(super) async fn stopped(&self) -> Limit {
        self.stop.cancelled().await;
        self.exceeded.get().copied().unwrap_or(Limit::DiskBytes)
    }

    #[cfg(test)]
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_cancelled()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: DiskLimits = DiskLimits { bytes: 1 << 30, inodes: 1000 };

    fn usage(bytes: u64, inodes: u64) -> DiskUsage {
        DiskUsage { bytes, inodes }
    }

    #[test]
    fn run_exceeds_the_limits_of_its_session() {
        let run = RunWatch::new(LIMITS, Some(usage(0, 1)));
        assert_eq!(run.exceeds(usage(1 << 30, 1000)), None);
        assert_eq!(run.exceeds(usage((1 << 30) + 1, 1)), Some(Limit::DiskBytes));
        assert_eq!(run.exceeds(usage(1, 1001)), Some(Limit::Inodes));
    }

    #[test]
    fn run_in_full_session_may_not_grow_it() {
        let full = usage(2 << 30, 5);
        for run in [RunWatch::new(LIMITS, Some(full)), RunWatch::new(LIMITS, None)] {
            assert_eq!(run.exceeds(full), None);
            assert_eq!(run.exceeds(usage((2 << 30) - 5, 5)), None, "it deletes");
            assert_eq!(run.exceeds(usage((2 << 30) + (2 << 20), 5)), Some(Limit::DiskBytes));
            assert_eq!(
                run.exceeds(usage(1 << 30, 1001)),
                Some(Limit::Inodes),
                "each limit for itself"
            );
        }
    }
}
