//! Which of the held sessions may have queued runs in the store: the poll reads these and not all
//! that are idle.
//!
//! The worker takes part in nearly everything that queues a run of a session it holds, and marks
//! the session when that is done: it acquires the session, hands a run back, gives up beginning
//! one, or an api offers it the session again. Everything else leaves a row in `waiting_sessions`,
//! which `lease_list_wanted` finds: an insert that waited for the acquisition, or that saw the
//! worker draining or its lease expired. A session with queued runs stays marked. All sessions are
//! read after a drain, and now and then, in case an answer was lost.

use std::{collections::HashSet, time::Duration};

use codelia_types::{Incarnation, SessionId};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Time between two reads of all sessions.
const READ_ALL_INTERVAL: Duration = Duration::from_secs(30);

/// The sessions that the poll must read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DueSessions {
    All,
    Marked(Vec<SessionId>),
}

/// Sessions that may have queued runs.
#[derive(Debug, Default)]
pub(crate) struct QueuedSessions(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    marked: HashSet<SessionId>,
    all_read: Option<(Incarnation, Instant)>,
}

impl QueuedSessions {
    /// Notes that a session may have queued runs. Called after the change in the store: a read
    /// before it would find nothing and remove the mark. Returns whether the mark is new.
    pub(crate) fn mark(&self, id: SessionId) -> bool {
        self.0.lock().marked.insert(id)
    }

    /// Takes what is to be read. The caller marks the sessions that have queued runs again.
    pub(crate) fn take_due(&self, incarnation: Incarnation) -> DueSessions {
        let mut state = self.0.lock();
        let marked = state.marked.drain().collect();
        match state.all_read {
            Some((by, at)) if by == incarnation && at.elapsed() < READ_ALL_INTERVAL => {
                DueSessions::Marked(marked)
            }
            _ => DueSessions::All,
        }
    }

    /// Marks sessions again that were taken and could not be read.
    pub(crate) fn not_read(&self, due: DueSessions) {
        let mut state = self.0.lock();
        match due {
            DueSessions::All => state.all_read = None,
            DueSessions::Marked(ids) => state.marked.extend(ids),
        }
    }

    /// All sessions were read by this incarnation, in a read that began then.
    pub(crate) fn all_read(&self, incarnation: Incarnation, began: Instant) {
        self.0.lock().all_read = Some((incarnation, began));
    }

    /// The next read is of all sessions.
    pub(crate) fn read_all_next(&self) {
        self.0.lock().all_read = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn marked_sessions_are_read_until_they_have_no_runs() {
        let (queued, incarnation, id) =
            (QueuedSessions::default(), Incarnation::generate(), SessionId::generate());
        queued.all_read(incarnation, Instant::now());
        let nothing = || DueSessions::Marked(vec![]);
        assert_eq!(queued.take_due(incarnation), nothing());
        assert!(queued.mark(id) && !queued.mark(id));
        let due = queued.take_due(incarnation);
        assert_eq!(due, DueSessions::Marked(vec![id]));
        queued.not_read(due);
        assert_eq!(queued.take_due(incarnation), DueSessions::Marked(vec![id]), "the read failed");
        assert_eq!(queued.take_due(incarnation), nothing());
    }

    #[tokio::test(start_paused = true)]
    async fn all_sessions_are_read_now_and_then() {
        let (queued, incarnation) = (QueuedSessions::default(), Incarnation::generate());
        assert_eq!(queued.take_due(incarnation), DueSessions::All, "the first read");
        queued.not_read(DueSessions::All);
        assert_eq!(queued.take_due(incarnation), DueSessions::All, "it failed");
        let read = || queued.all_read(incarnation, Instant::now());
        read();
        tokio::time::advance(READ_ALL_INTERVAL / 2).await;
        assert_ne!(queued.take_due(incarnation), DueSessions::All);
        assert_eq!(
            queued.take_due(Incarnation::generate()),
            DueSessions::All,
            "another incarnation"
        );
        tokio::time::advance(READ_ALL_INTERVAL / 2).await;
        assert_eq!(queued.take_due(incarnation), DueSessions::All);
        read();
        queued.read_all_next();
        assert_eq!(queued.take_due(incarnation), DueSessions::All, "after a drain");
    }
}
