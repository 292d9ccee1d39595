//! The upkeep: ends the leases and runs of dead workers, expires sessions and queued runs. One
//! process owns it, but nothing depends on that: each statement locks what it changes.

use super::session::end_session;
use crate::{
    protocol::{Protocol, Variant},
    state::{
        EndReason, EndedRun, Incarnation, Mask, Outcome, RUNS, SESSIONS, State, UPKEEP_TTL,
        UpkeepRow, WORKERS, bit, mask, rows,
    },
    statement::{Answer, Effect, Statement},
};

impl Protocol {
    /// Whether a process may do the upkeep: it is its own, or its owner stopped to renew it.
    pub(crate) fn may_own_upkeep(&self, state: &State, process: usize) -> bool {
        let UpkeepRow { owner, until } = state.upkeep;
        // No claim lasts so long: it is from before the clock was set back.
        let is_too_long = until > state.now + 2 * UPKEEP_TTL;
        let is_expired = (until <= state.now || is_too_long) && !self.is(Variant::NoUpkeepExpiry);
        owner == process || is_expired
    }

    /// A process takes or keeps the upkeep, which it does before each pass.
    pub(crate) fn own_upkeep(&self, state: &mut State, process: usize) {
        if self.bounds.two_upkeep_processes {
            state.upkeep = UpkeepRow { owner: process, until: state.now + UPKEEP_TTL };
        }
    }

    pub(crate) fn upkeep_effect(
        &self,
        state: &State,
        statement: Statement,
    ) -> Result<Effect, Answer> {
        let locked_sessions = self.locked_sessions(state);
        let locked_runs = self.locked_runs(state);
        let is_past_expiry = self.bounds.expires_at.is_some_and(|at| at <= state.now);
        let effect = match statement {
            Statement::Sweep => self.sweep_effect(state),
            Statement::ExpireSessions => {
                let is_due = |session: usize| {
                    state.sessions[session].is_open() && !self.has_live_run(state, session)
                };
                let due = if is_past_expiry { mask(SESSIONS, is_due) } else { 0 };
                // The statement locks a session that it found due, and skips it if it is locked
                // then.
                let locked = if self.is(Variant::OneSnapshotExpiry) { 0 } else { locked_sessions };
                Effect { sessions: due & !locked, ..Effect::default() }
            }
            // No worker takes the run of an expired session, so its queue timeout passes.
            _ if is_past_expiry => Effect {
                runs: mask(RUNS, |run| state.is_queued(run)) & !locked_runs,
                ..Effect::default()
            },
            _ => Effect::default(),
        };
        if effect == Effect::default() { Err(Answer::Done) } else { Ok(effect) }
    }

    /// Finds expired workers, the sessions they hold and the runs they may have started. Skips
    /// locked rows.
    fn sweep_effect(&self, state: &State) -> Effect {
        let locked_workers = self.locked_workers(state);
        let is_expired = |worker: usize| {
            let row = state.rows[worker];
            row.lease_until <= state.now && !row.is_gone && locked_workers & bit(worker) == 0
        };
        let workers = if self.is(Variant::NoExpiryMark) { 0 } else { mask(WORKERS, is_expired) };
        let is_held_by_dead = |session: usize| {
            state.sessions[session].holder.is_some_and(|by| self.is_dead(state, workers, by))
        };
        let locked = self.locked_sessions(state);
        let orphans = self.orphans(state, workers) & !self.locked_runs(state);
        // The sweep locks the sessions of these runs too, so that one that ends meanwhile sees them
        // queued.
        let is_unlocked = |run: usize| locked & bit(self.session_of(run)) == 0;
        let runs = orphans & mask(RUNS, is_unlocked);
        let of_runs = rows(runs).fold(0, |sessions, run| sessions | bit(self.session_of(run)));
        let sessions = (mask(SESSIONS, is_held_by_dead) & !locked) | of_runs;
        Effect { workers, sessions, runs, ..Effect::default() }
    }

    /// Runs whose worker is dead.
    pub(super) fn orphans(&self, state: &State, marked: Mask) -> Mask {
        let is_orphan = |run| {
            state.assignment(run).is_some_and(|of| self.is_dead(state, marked, of.incarnation))
        };
        mask(RUNS, is_orphan)
    }

    /// Whether an incarnation can never renew again: another one registered, it is marked as gone,
    /// or this statement marks it.
    fn is_dead(&self, state: &State, marked: Mask, of: Incarnation) -> bool {
        let row = state.rows[of.worker];
        row.incarnation != of.number
            || row.is_gone
            || marked & bit(of.worker) != 0
            || (self.is(Variant::NoExpiryMark) && !state.has_live_lease(of))
    }

    pub(super) fn commit_upkeep(
        &self,
        state: &mut State,
        statement: Statement,
        effect: Effect,
    ) -> Answer {
        match statement {
            Statement::Sweep => {
                mark_gone(state, effect.workers);
                for session in rows(effect.sessions) {
                    if state.sessions[session].holder.is_some_and(|by| self.is_dead(state, 0, by)) {
                        state.sessions[session].holder = None;
                    }
                }
                self.resolve_orphans(state, effect.runs);
                rows(effect.sessions).for_each(|session| self.mark_waiting(state, session));
            }
            Statement::ExpireSessions => {
                let locked = if self.is(Variant::OneSnapshotExpiry) {
                    self.locked_sessions(state)
                } else {
                    0
                };
                for session in rows(effect.sessions & !locked) {
                    state.past.expired_busy_session |= self.has_live_run(state, session);
                    end_session(state, session, EndReason::Expired);
                }
            }
            _ => end_runs(state, effect.runs, Outcome::Refused),
        }
        Answer::Done
    }

    /// Lets workers find a session that has queued runs and no live holder.
    pub(super) fn mark_waiting(&self, state: &mut State, session: usize) {
        let is_unheld = state.live_holder(session).is_none() && state.sessions[session].is_open();
        let is_needed = is_unheld && self.queued_runs(state, session) != 0;
        state.sessions[session].is_waiting |= is_needed && !self.is(Variant::NoWaitingRow);
    }

    /// Queues runs of a dead worker again if their callers allowed retries, else ends them as lost.
    pub(super) fn resolve_orphans(&self, state: &mut State, runs: Mask) {
        for run in rows(runs) {
            let is_open = state.sessions[self.session_of(run)].is_open();
            // Only a sweep that has not locked the run can find it changed.
            let Some(assignment) = state.assignment(run) else { continue };
            state.past.took_live_run |= state.has_live_lease(assignment.incarnation);
            let Some(live) = &mut state.runs[run].live else { continue };
            let is_allowed = live.attempt <= self.bounds.runs[run].retries
                || (self.is(Variant::UnrequestedRetry) && live.attempt < 2);
            let is_canceled = live.canceled_in.is_some() && !self.is(Variant::RetriedCancel);
            if is_allowed && !is_canceled && is_open {
                live.assignment = None;
                live.attempt += 1;
                if !self.is(Variant::KeptOutput) {
                    state.runs[run].output = 0;
                }
            } else {
                end_runs(state, bit(run), Outcome::Lost);
            }
        }
    }
}

/// Marks expired workers, so that no renewal in flight can revive them.
pub(super) fn mark_gone(state: &mut State, workers: Mask) {
    rows(workers).for_each(|worker| state.rows[worker].is_gone = true);
}

/// Moves live runs to the history in one statement.
pub(super) fn end_runs(state: &mut State, runs: Mask, outcome: Outcome) {
    rows(runs).for_each(|run| end_run(state, run, EndedRun { outcome, by: None, start: 0 }));
}

/// Moves one live run to the history.
pub(super) fn end_run(state: &mut State, run: usize, ended: EndedRun) {
    state.runs[run].live = None;
    state.runs[run].ended = Some(ended);
    state.past.outcomes[run] += 1;
}
