//! Rates of one sandbox, and the share of the process's connections that each sandbox has.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

/// Connections that each sandbox can always have.
const GUARANTEED: usize = 8;

/// Lets a number of events pass in each second, with bursts of the same number.
#[derive(Debug)]
pub(crate) struct Rate {
    /// When the bucket is full.
    full_at: Mutex<Instant>,
}

impl Rate {
    pub(crate) fn new() -> Self {
        Self { full_at: Mutex::new(Instant::now()) }
    }

    /// Takes one event and returns when it may happen.
    fn take(&self, per_second: u32) -> Instant {
        let now = Instant::now();
        let interval = Duration::from_secs(1) / per_second.max(1);
        let mut full_at = self.full_at.lock();
        *full_at = (*full_at).max(now) + interval;
        *full_at - Duration::from_secs(1)
    }

    /// Waits until an event may happen. Returns whether it had to wait.
    pub(crate) async fn pass(&self, per_second: u32) -> bool {
        let at = self.take(per_second);
        let waits = at > Instant::now();
        if waits {
            sleep_until(at).await;
        }
        waits
    }
}

/// The connections of all sandboxes. Each sandbox can always have [`GUARANTEED`] of them, so none
/// can take the last ones of the others.
#[derive(Debug)]
pub(crate) struct Capacity {
    max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used: usize,
    /// Guaranteed connections that are not used now.
    reserved: usize,
}

impl Capacity {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, state: Mutex::default() })
    }

    /// Adds a sandbox.
    pub(crate) fn join(self: &Arc<Self>) -> Share {
        self.state.lock().reserved += GUARANTEED;
        Share { capacity: self.clone(), used: Mutex::new(0) }
    }

    /// How many connections are open.
    pub(crate) fn used(&self) -> usize {
        self.state.lock().used
    }
}

/// The connections of one sandbox.
#[derive(Debug)]
pub(crate) struct Share {
    capacity: Arc<Capacity>,
    used: Mutex<usize>,
}

/// Which limit refused the permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// The sandbox has as many connections as it may.
    Sandbox,
    /// The process has.
    Process,
}

impl Share {
    /// Takes a connection. The permit gives it back.
    pub(crate) fn take(self: &Arc<Self>, max: u32) -> Result<Permit, Full> {
        let mut used = self.used.lock();
        if *used >= max as usize {
            return Err(Full::Sandbox);
        }
        let mut state = self.capacity.state.lock();
        let free = self.capacity.max.saturating_sub(state.used);
        let guaranteed = *used < GUARANTEED;
        if free == 0 || (!guaranteed && free <= state.reserved) {
            return Err(Full::Process);
        }
        state.used += 1;
        state.reserved -= usize::from(guaranteed);
        *used += 1;
        Ok(Permit(self.clone()))
    }
}

impl Drop for Share {
    /// No permit is left: each holds the share.
    fn drop(&mut self) {
        self.capacity.state.lock().reserved -= GUARANTEED;
    }
}

/// A connection that counts.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Share>);

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.0.used.lock();
        let mut state = self.0.capacity.state.lock();
        *used -= 1;
        state.used -= 1;
        state.reserved += usize::from(*used < GUARANTEED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rate_allows_burst_then_waits() {
        let rate = Rate::new();
        for _ in 0..10 {
            assert!(!rate.pass(10).await, "burst");
        }
        let start = Instant::now();
        for _ in 0..10 {
            assert!(rate.pass(10).await);
        }
        assert_eq!(start.elapsed().as_millis(), 1000);
    }

    #[test]
    fn one_sandbox_leaves_others_their_connections() {
        let capacity = Capacity::new(40);
        let (greedy, modest) = (Arc::new(capacity.join()), Arc::new(capacity.join()));
        let mut taken: Vec<_> = std::iter::from_fn(|| greedy.take(1000).ok()).collect();
        assert_eq!(taken.len(), 40 - GUARANTEED);
        assert_eq!(greedy.take(1000).unwrap_err(), Full::Process);
        let others: Vec<_> = std::iter::from_fn(|| modest.take(1000).ok()).collect();
        assert_eq!(others.len(), GUARANTEED);
        drop(taken.pop());
        assert!(modest.take(1000).is_ok(), "free connections are for everyone");
        assert_eq!(modest.take(GUARANTEED as u32).unwrap_err(), Full::Sandbox);
        drop((taken, others, greedy, modest));
        let state = capacity.state.lock();
        assert_eq!((state.used, state.reserved), (0, 0));
    }
}
