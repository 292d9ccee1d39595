//! Connections that were used a moment ago, for the next statements.
//!
//! A pool of sqlx asks the server whether a connection works when it is returned and when it is
//! taken: two round trips for each statement. A connection whose last statement succeeded a moment
//! ago needs neither.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use codelia_telemetry::task;
use sqlx::{Postgres, pool::PoolConnection};
use tokio::time::{Instant, sleep};

/// A connection that was not used for this long is given back in the next round, and there is one
/// in each such time.
const KEEP_TIME: Duration = Duration::from_secs(1);
/// After this many rounds all are given back.
const MAX_ROUNDS: u32 = 60;

/// The kept connections of a pool, which counts them as used.
#[derive(Debug, Default)]
pub(super) struct RecentConnections {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The one that was used last is at the end.
    kept: Vec<(PoolConnection<Postgres>, Instant)>,
    /// Callers that wait for a connection of the pool.
    waiting: usize,
    is_closed: bool,
    /// Whether a task gives unused ones back.
    has_task: bool,
}

impl RecentConnections {
    pub(super) fn take(&self) -> Option<PoolConnection<Postgres>> {
        self.lock().kept.pop().map(|(connection, _)| connection)
    }

    /// Keeps a connection whose last statement succeeded, unless somebody waits for one.
    pub(super) fn keep(self: &Arc<Self>, connection: PoolConnection<Postgres>) {
        let mut state = self.lock();
        if state.waiting > 0 || state.is_closed {
            return;
        }
        state.kept.push((connection, Instant::now()));
        if !std::mem::replace(&mut state.has_task, true) {
            task::background("recent connections", give_back_unused(Arc::downgrade(self)));
        }
    }

    /// Gives all back to the pool, and keeps none until this is dropped.
    pub(super) fn wait(&self) -> Waiting<'_> {
        let mut state = self.lock();
        state.waiting += 1;
        state.kept.clear();
        Waiting { recent: self }
    }

    /// Gives all back to the pool.
    pub(super) fn clear(&self) {
        self.lock().kept.clear();
    }

    /// Gives all back to the pool, and keeps none anymore.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.kept.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives those that nobody uses back to the pool, until there are none. Now and then it gives all
/// back: the pool closes connections that live for too long.
async fn give_back_unused(recent: Weak<RecentConnections>) {
    for round in 1_u32.. {
        sleep(KEEP_TIME).await;
        let Some(recent) = recent.upgrade() else { return };
        let mut state = recent.lock();
        let is_last = round.is_multiple_of(MAX_ROUNDS);
        state.kept.retain(|(_, used_at)| !is_last && used_at.elapsed() < KEEP_TIME);
        if state.kept.is_empty() {
            state.has_task = false;
            return;
        }
    }
}

/// A caller waits for a connection of the pool.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    recent: &'a RecentConnections,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.recent.lock().waiting -= 1;
    }
}
