//! The table `workers`, and the acquisition of a session's lease.

use super::sweep::mark_gone;
use crate::{
    protocol::{Protocol, Variant},
    state::{
        Assignment, EndedRun, Incarnation, Outcome, ROOT_GRACE, RUNS, State, TTL, WORKERS, bit,
        mask,
    },
    statement::{Answer, Effect, Statement},
};

impl Protocol {
    /// The root of a worker.
    pub(crate) fn root(&self, worker: usize) -> usize {
        if self.bounds.separate_roots { worker } else { 0 }
    }

    /// Whether no worker on a root has been alive for longer than a restart takes.
    pub(crate) fn root_is_gone(&self, state: &State, root: usize) -> bool {
        let is_gone = |worker: usize| state.rows[worker].lease_until + ROOT_GRACE <= state.now;
        (0..WORKERS).all(|worker| self.root(worker) != root || is_gone(worker))
    }

    pub(super) fn worker_row_effect(
        &self,
        state: &State,
        by: Incarnation,
        statement: Statement,
    ) -> Result<Effect, Answer> {
        let row = state.rows[by.worker];
        let is_allowed = match statement {
            Statement::Register { replaces, .. } => {
                row.incarnation == replaces || self.is(Variant::UnguardedRegistration)
            }
            Statement::Renew { .. } => state.has_live_lease(by),
            _ => row.incarnation == by.number || self.is(Variant::UnguardedLeave),
        };
        let effect = Effect { workers: bit(by.worker), at: state.now, ..Effect::default() };
        if is_allowed { Ok(effect) } else { Err(Answer::Refused) }
    }

    /// A worker takes an open session that no live worker holds and whose files it has.
    pub(super) fn acquire_effect(
        &self,
        state: &State,
        by: Incarnation,
        session: usize,
    ) -> Result<Effect, Answer> {
        let row = state.sessions[session];
        let can_take = state.has_live_lease(by) && state.rows[by.worker].is_ready;
        let has_files = row.home.is_none_or(|home| {
            let may_lose = self.bounds.allow_data_loss && self.root_is_gone(state, home);
            home == self.root(by.worker) || may_lose || self.is(Variant::NoHomeCheck)
        });
        let is_free = state.live_holder(session).is_none();
        if !(self.is_usable(state, session) && can_take && has_files && is_free) {
            return Err(Answer::Refused);
        }
        let holder =
            row.holder.filter(|holder| state.rows[holder.worker].incarnation == holder.number);
        let is_unmarked = |holder: &Incarnation| !state.rows[holder.worker].is_gone;
        let marked = holder.filter(is_unmarked).map_or(0, |holder| bit(holder.worker));
        let workers = if self.is(Variant::NoExpiryMark) { 0 } else { marked };
        let runs = self.orphans(state, workers) & mask(RUNS, |run| self.session_of(run) == session);
        Ok(Effect { workers, sessions: bit(session), runs, ..Effect::default() })
    }

    pub(super) fn commit_acquire(
        &self,
        state: &mut State,
        by: Incarnation,
        session: usize,
        effect: Effect,
    ) -> Answer {
        mark_gone(state, effect.workers);
        let row = &mut state.sessions[session];
        row.holder = Some(by);
        row.epoch += 1;
        row.home = Some(self.root(by.worker));
        row.is_waiting = false;
        let epoch = row.epoch;
        self.resolve_orphans(state, effect.runs);
        let has_files = epoch > 1 && !self.bounds.allow_data_loss && self.was_used(state, session);
        Answer::Acquired { epoch, has_files }
    }

    /// Whether the tables say that a command may have been started in the session.
    fn was_used(&self, state: &State, session: usize) -> bool {
        let may_have_started = |ended: EndedRun| ended.start > 0 || ended.outcome == Outcome::Lost;
        (0..self.bounds.runs.len()).filter(|run| self.session_of(*run) == session).any(|run| {
            let row = state.runs[run];
            row.ended.is_some_and(may_have_started) || row.live.is_some_and(|live| live.attempt > 1)
        })
    }
}

/// The lease that a run or session has under this epoch.
pub(super) fn assignment(by: Incarnation, epoch: u8) -> Assignment {
    Assignment { incarnation: by, epoch }
}

pub(super) fn commit_register(state: &mut State, worker: usize, number: u8, effect: Effect) {
    let row = &mut state.rows[worker];
    row.incarnation = number;
    row.lease_until = effect.at + TTL;
    row.is_ready = true;
    row.is_gone = false;
}

pub(super) fn commit_worker_row(
    state: &mut State,
    worker: usize,
    statement: Statement,
    effect: Effect,
) {
    let row = &mut state.rows[worker];
    if statement == Statement::Leave {
        row.lease_until = effect.at;
        row.is_gone = true;
    } else {
        row.lease_until = effect.at + TTL;
    }
}
