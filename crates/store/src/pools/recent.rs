//! Connections that were used a moment ago, for the next statements.
//!
//! A pool of sqlx asks the server whether a connection works when it is returned and when it is taken:
//! two round trips for each statement. A connection whose last statement succeeded a moment ago needs
//! neither.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use codelia_telemetry::task;
use sqlx::{Postgres, pool::PoolConnection};
use tokio::time::{Instant, sleep};

/// How long a connection is kept after a statement, at least. Not much longer.
const MIN_AGE: Duration = Duration::from_secs(1);
/// After this many times [`MIN_AGE`] all are given back.
const ALL_ROUNDS: u32 = 60;

/// The kept connections of a pool. They count as used there.
#[derive(Debug, Default)]
pub(super) struct Recent {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The one that was used last is at the end.
    kept: Vec<(PoolConnection<Postgres>, Instant)>,
    /// Callers that wait for a connection of the pool.
    waiting: usize,
    is_closed: bool,
    /// Whether a task gives old ones back.
    has_task: bool,
}

impl Recent {
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
            task::background("recent connections", give_back_old(Arc::downgrade(self)));
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
async fn give_back_old(recent: Weak<Recent>) {
    for round in 1_u32.. {
        sleep(MIN_AGE).await;
        let Some(recent) = recent.upgrade() else { return };
        let mut state = recent.lock();
        let is_for_all = round.is_multiple_of(ALL_ROUNDS);
        state.kept.retain(|(_, used_at)| !is_for_all && used_at.elapsed() < MIN_AGE);
        if state.kept.is_empty() {
            state.has_task = false;
            return;
        }
    }
}

/// A caller waits for a connection of the pool.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    recent: &'a Recent,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.recent.lock().waiting -= 1;
    }
}
