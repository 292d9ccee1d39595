//! Actions of a worker with its leases, and with sessions that have ended.

use crate::{
    action::Action,
    local::{LocalLease, LocalRun},
    protocol::Protocol,
    state::{RUNS, SESSIONS, State, bit},
    statement::Statement,
};

impl Protocol {
    pub(super) fn lease_actions(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if now.is_partitioned {
            return;
        }
        for session in 0..SESSIONS {
            self.session_actions(state, worker, session, actions);
        }
        let me = state.incarnation(worker);
        let holds = |session: usize| {
            state.sessions[session].holder == Some(me) || now.leases[session] != LocalLease::None
        };
        let is_busy = now.runs.iter().any(|run| run.is_active());
        if now.is_draining
            && !(0..SESSIONS).any(holds)
            && !is_busy
            && !state.awaits(worker, changes_lease)
        {
            actions.push(Action::Leave { worker });
        }
    }

    fn session_actions(
        &self,
        state: &State,
        worker: usize,
        session: usize,
        actions: &mut Vec<Action>,
    ) {
        let now = &state.workers[worker];
        let row = state.sessions[session];
        let holds = row.holder == Some(state.incarnation(worker));
        let is_busy =
            (0..RUNS).any(|run| self.session_of(run) == session && now.runs[run].is_active());
        if state.awaits(worker, |statement| {
            changes_lease(statement) && session_of(statement) == session
        }) {
            return;
        }
        match now.leases[session] {
            LocalLease::None if holds && row.is_open() => {
                actions.push(Action::Release { worker, session, epoch: row.epoch });
            }
            LocalLease::None if self.wants(state, worker, session) => {
                actions.push(Action::Acquire { worker, session });
            }
            LocalLease::Held(epoch) | LocalLease::Closing(epoch) if now.is_draining && !is_busy => {
                actions.push(Action::Release { worker, session, epoch });
            }
            LocalLease::Releasing(epoch) => {
                actions.push(Action::Release { worker, session, epoch })
            }
            _ => {}
        }
        self.removal_actions(state, worker, session, actions);
    }

    /// Whether a worker would take a session. The first worker is the first to try: until then both
    /// are alike, so the other way round shows nothing new.
    fn wants(&self, state: &State, worker: usize, session: usize) -> bool {
        let is_needed = (0..self.bounds.runs.len()).any(|run| self.session_of(run) == session);
        is_needed
            && (worker == 0 || state.past.had_acquire)
            && state.believes_leased(worker)
            && !state.workers[worker].is_draining
            && self.is_usable(state, session)
            && state.live_holder(session).is_none()
    }

    fn removal_actions(
        &self,
        state: &State,
        worker: usize,
        session: usize,
        actions: &mut Vec<Action>,
    ) {
        let now = &state.workers[worker];
        if now.removing & bit(session) != 0 {
            return actions.push(Action::RemoveDirectory { worker, session });
        }
        if state.believes_leased(worker) && self.is_removable(state, worker, session) {
            let of_session = |run: &usize| self.session_of(*run) == session;
            let is_held = matches!(now.leases[session], LocalLease::Held(_));
            let can_cancel = |run: LocalRun| {
                matches!(
                    run,
                    LocalRun::Assigned { .. } | LocalRun::Checked { .. } | LocalRun::Running(_)
                )
            };
            let is_busy = (0..RUNS).filter(of_session).any(|run| now.runs[run].is_executed());
            let cancels = (0..RUNS).filter(of_session).any(|run| can_cancel(now.runs[run]));
            if is_held || cancels || !is_busy {
                actions.push(Action::BeginRemoval { worker, session });
            }
        }
    }
}

/// Whether the worker does not know its lease on a session until the answer.
fn changes_lease(statement: Statement) -> bool {
    matches!(
        statement,
        Statement::Acquire { .. }
            | Statement::Release { .. }
            | Statement::EndDataLost { .. }
            | Statement::MarkRemoved { .. }
    )
}

fn session_of(statement: Statement) -> usize {
    match statement {
        Statement::Acquire { session }
        | Statement::Release { session, .. }
        | Statement::EndDataLost { session, .. }
        | Statement::MarkRemoved { session } => session,
        _ => SESSIONS,
    }
}
