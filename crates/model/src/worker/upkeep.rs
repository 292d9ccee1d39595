//! The removal of ended sessions, as in `crates/worker/src/upkeep.rs`.

use crate::{
    local::{LocalLease, LocalRun},
    properties::is_exempt,
    protocol::Protocol,
    state::{Directory, RUNS, State, WORKERS, bit},
    statement::Statement,
};

impl Protocol {
    /// Whether a worker removes this session: it has ended, its files are on the worker's root, and
    /// no other live worker holds it.
    pub(crate) fn is_removable(&self, state: &State, worker: usize, session: usize) -> bool {
        let row = state.sessions[session];
        let me = state.incarnation(worker);
        let is_free = state.live_holder(session).is_none_or(|holder| holder == me);
        !row.is_open() && !row.is_removed && row.home == Some(self.root(worker)) && is_free
    }

    /// Cancels the runs of an ended session. If the worker executes none, it removes the directory
    /// next.
    pub(crate) fn begin_removal(&self, state: &mut State, worker: usize, session: usize) {
        let now = &mut state.workers[worker];
        if let LocalLease::Held(epoch) = now.leases[session] {
            now.leases[session] = LocalLease::Closing(epoch);
        }
        let mut is_busy = false;
        for run in (0..RUNS).filter(|run| self.session_of(*run) == session) {
            is_busy |= now.runs[run].is_executed();
            now.runs[run] = now.runs[run].canceled();
        }
        if !is_busy {
            now.removing |= bit(session);
        }
    }

    /// Removes the directory and records it.
    pub(crate) fn remove_directory(&self, state: &mut State, worker: usize, session: usize) {
        let root = self.root(worker);
        state.workers[worker].removing &= !bit(session);
        state.directories[session][root] = Directory::Missing;
        let runs_here = |worker: usize, run: usize| {
            let LocalRun::Running(command) = state.workers[worker].runs[run] else { return false };
            let is_here = self.root(worker) == root && self.session_of(run) == session;
            is_here && !is_exempt(&state.workers[worker], command)
        };
        let is_used = (0..WORKERS).any(|worker| (0..RUNS).any(|run| runs_here(worker, run)));
        state.past.missed_directory |= is_used;
        state.send_from(worker, Statement::MarkRemoved { session });
    }
}
