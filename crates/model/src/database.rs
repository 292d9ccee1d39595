//! The database: what each statement checks and changes, as in `crates/store`.
//!
//! A statement reads everything when it is executed and locks its own row until it is committed. The
//! other rows that it read may change before that.

use crate::{
    protocol::{Protocol, Variant},
    state::{Assignment, Incarnation, Push, RunState, State, TTL},
    statement::{Answer, Call, Lock, Stage, Statement},
};

impl State {
    /// Whether the lease of an incarnation is live.
    pub(crate) fn has_live_lease(&self, incarnation: Incarnation) -> bool {
        let row = self.rows[usize::from(incarnation.worker)];
        row.incarnation == incarnation.number && row.lease_until > self.now && !row.is_marked_expired
    }

    /// Whether an incarnation can never renew again: another one registered, or it was marked as
    /// expired.
    pub(crate) fn is_marked_expired(&self, incarnation: Incarnation) -> bool {
        let row = self.rows[usize::from(incarnation.worker)];
        row.incarnation != incarnation.number || row.is_marked_expired
    }

    fn holds(&self, assignment: Assignment) -> bool {
        self.session.holder == Some(assignment.incarnation) && self.session.epoch == assignment.epoch
    }

    pub(crate) fn live_holder(&self) -> Option<Incarnation> {
        self.session.holder.filter(|holder| self.has_live_lease(*holder))
    }

    pub(crate) fn is_locked(&self, lock: Lock) -> bool {
        self.calls.iter().any(|call| call.holds(lock))
    }
}

impl Protocol {
    /// Marks workers whose lease expired, so that no renewal in flight can revive them. Skips rows
    /// that are locked by a renewal.
    fn mark_expired(&self, state: &mut State) {
        for worker in 0..state.rows.len() {
            let is_locked = state.is_locked(Lock::Worker(crate::worker::index(worker)));
            if state.rows[worker].lease_until <= state.now && (!is_locked || self.is(Variant::NoExpiryMark)) {
                state.rows[worker].is_marked_expired = !self.is(Variant::NoExpiryMark);
            }
        }
    }

    /// Whether an incarnation counts as dead.
    fn is_replaceable(&self, state: &State, incarnation: Incarnation) -> bool {
        state.is_marked_expired(incarnation)
            || (self.is(Variant::NoExpiryMark) && !state.has_live_lease(incarnation))
    }

    /// Whether a call must wait for a lock of another one.
    pub(crate) fn must_wait(&self, state: &State, call: &Call) -> bool {
        match call.lock() {
            Lock::Session => {
                state.is_locked(Lock::Session)
                    || (!self.is(Variant::NoInsertLock) && state.is_locked(Lock::SessionShared))
            }
            Lock::SessionShared => !self.is(Variant::NoInsertLock) && state.is_locked(Lock::Session),
            lock => state.is_locked(lock),
        }
    }

    /// Executes a statement: it checks its conditions and takes its lock, or is refused.
    pub(crate) fn execute(&self, state: &mut State, index: usize) {
        let call = state.calls[index];
        if call.statement == Statement::Acquire {
            self.mark_expired(state);
        }
        let refusal = self.refusal(state, &call);
        if let Statement::Commit { run, epoch } = call.statement
            && refusal.is_none()
        {
            let assignment = call.assignment(epoch);
            let is_assigned =
                state.runs[run].state == RunState::Running(assignment) && state.holds(assignment);
            state.history.stale_commit |= !(is_assigned && state.has_live_lease(call.by));
        }
        state.calls[index].stage = match refusal {
            Some(answer) => Stage::Answered(answer),
            None => Stage::Executed {
                at: if matches!(call.statement, Statement::Renew { .. }) { state.now } else { 0 },
                assignment: self.holder_for(state, call.statement),
            },
        };
    }

    /// The live, ready holder that an insert assigns its run to.
    fn holder_for(&self, state: &State, statement: Statement) -> Option<Assignment> {
        let Statement::Insert { .. } = statement else { return None };
        let incarnation =
            state.live_holder().filter(|incarnation| state.rows[usize::from(incarnation.worker)].is_ready)?;
        Some(Assignment { incarnation, epoch: state.session.epoch })
    }

    fn refusal(&self, state: &State, call: &Call) -> Option<Answer> {
        let is_live = state.has_live_lease(call.by);
        let run_state = |run: usize| state.runs[run].state;
        let is_allowed = match call.statement {
            Statement::Insert { .. } => true,
            Statement::Renew { .. } => is_live,
            Statement::Acquire => {
                let is_free = state.session.holder.is_none_or(|holder| self.is_replaceable(state, holder));
                is_live && state.rows[usize::from(call.by.worker)].is_ready && is_free
            }
            Statement::Release { epoch } => {
                let is_busy = state.runs.iter().any(|run| matches!(run.state, RunState::Running(_)));
                if state.holds(call.assignment(epoch)) && is_busy {
                    return Some(Answer::Busy);
                }
                state.holds(call.assignment(epoch))
            }
            Statement::Begin { run, epoch } => {
                run_state(run) == RunState::Queued && state.holds(call.assignment(epoch)) && is_live
            }
            Statement::HandBack { run, turn } => {
                let same_turn = state.runs[run].turn == turn || self.is(Variant::NoTurnGuard);
                matches!(run_state(run), RunState::Running(assignment) if assignment.incarnation == call.by)
                    && same_turn
            }
            Statement::Commit { run, epoch } => {
                let assignment = call.assignment(epoch);
                match run_state(run) {
                    RunState::Running(_) if self.is(Variant::NoCommitGuard) => true,
                    RunState::Running(of) => of == assignment && state.holds(assignment) && is_live,
                    // Repeated after the first answer was lost.
                    RunState::Exited(by) if by == assignment => return Some(Answer::Done(0)),
                    _ => false,
                }
            }
        };
        (!is_allowed).then_some(Answer::Refused)
    }

    /// Commits a statement: others see its effect.
    pub(crate) fn commit(&self, state: &mut State, index: usize) {
        let call = state.calls[index];
        let Stage::Executed { at, assignment } = call.stage else { return };
        let mut number = 0;
        match call.statement {
            Statement::Insert { run } => self.insert(state, run, assignment),
            Statement::Renew { .. } => state.rows[usize::from(call.by.worker)].lease_until = at + TTL,
            Statement::Acquire => {
                state.session.holder = Some(call.by);
                state.session.epoch += 1;
                number = state.session.epoch;
                self.resolve_orphans(state);
            }
            Statement::Release { .. } => state.session.holder = None,
            Statement::Begin { run, epoch } => {
                state.runs[run].state = RunState::Running(call.assignment(epoch));
                state.runs[run].turn += 1;
                number = state.runs[run].turn;
            }
            Statement::HandBack { run, .. } => state.runs[run].state = RunState::Queued,
            Statement::Commit { run, epoch } => {
                state.runs[run].state = RunState::Exited(call.assignment(epoch));
                state.history.outcomes[run] += 1;
            }
        }
        state.calls[index].stage = Stage::Answered(Answer::Done(number));
    }

    fn insert(&self, state: &mut State, run: usize, assignment: Option<Assignment>) {
        state.runs[run].state = assignment.map_or(RunState::Queued, RunState::Running);
        // The api may push it once, several times, or never.
        state.pushes[run] = assignment.map(|assignment| Push { assignment, copies: self.bounds.pushes });
    }

    /// Ends the lease of a dead worker and resolves its runs. Any api or worker may do it.
    pub(crate) fn sweep(&self, state: &mut State) {
        self.mark_expired(state);
        let is_free = !state.is_locked(Lock::Session) && !state.is_locked(Lock::SessionShared);
        if is_free && state.session.holder.is_some_and(|holder| self.is_replaceable(state, holder)) {
            state.session.holder = None;
        }
        self.resolve_orphans(state);
    }

    /// Resolves runs whose worker is dead: queued again if retries are allowed, else lost. Skips a
    /// locked run, which is being committed.
    fn resolve_orphans(&self, state: &mut State) {
        for run in 0..state.runs.len() {
            let RunState::Running(assignment) = state.runs[run].state else { continue };
            if !self.is_replaceable(state, assignment.incarnation) || state.is_locked(Lock::Run(run)) {
                continue;
            }
            let is_retryable = state.runs[run].attempt <= self.bounds.retries[run];
            if is_retryable || (self.is(Variant::UnrequestedRetry) && state.runs[run].attempt < 2) {
                state.runs[run].state = RunState::Queued;
                state.runs[run].attempt += 1;
            } else {
                state.runs[run].state = RunState::Lost;
                state.history.outcomes[run] += 1;
            }
        }
    }
}
