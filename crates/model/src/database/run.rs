//! The tables of runs and their output.

use super::{
    lease::assignment,
    session::commit_close,
    sweep::{end_run, end_runs},
};
use crate::{
    protocol::{Protocol, Variant},
    state::{Assignment, EndedRun, Incarnation, LiveRun, Outcome, Push, State, bit},
    statement::{Answer, Call, Effect, Statement},
};

impl Protocol {
    /// Whether an insert of this run would record it now.
    pub(crate) fn is_admissible(&self, state: &State, run: usize) -> bool {
        let session = self.session_of(run);
        let row = state.sessions[session];
        let is_unheld = state.live_holder(session).is_none();
        let is_lost = is_unheld
            && !self.bounds.allow_data_loss
            && row.home.is_some_and(|home| self.root_is_gone(state, home));
        let is_new = state.past.recorded & bit(run) == 0;
        is_new && !self.has_key(state) && self.is_usable(state, session) && !is_lost
    }

    /// Whether the idempotency key names a run already.
    fn has_key(&self, state: &State) -> bool {
        let is_found =
            |run: usize| !self.is(Variant::KeyOfLiveRunsOnly) || state.runs[run].live.is_some();
        state.key.is_some_and(is_found)
    }

    pub(super) fn caller_effect(
        &self,
        state: &State,
        statement: Statement,
    ) -> Result<Effect, Answer> {
        match statement {
            Statement::Insert { run } if self.is_admissible(state, run) => {
                let session = self.session_of(run);
                let is_ready = |holder: &Incarnation| state.rows[holder.worker].is_ready;
                let holder = state.live_holder(session).filter(is_ready);
                let assignment =
                    holder.map(|holder| assignment(holder, state.sessions[session].epoch));
                let waits = state.live_holder(session).is_none();
                Ok(Effect { sessions: bit(session), assignment, waits, ..Effect::default() })
            }
            Statement::Cancel { run } if state.runs[run].live.is_some() => {
                Ok(Effect { runs: bit(run), ..Effect::default() })
            }
            Statement::Close { session } => self.close_effect(state, session),
            _ => Err(Answer::Done),
        }
    }

    pub(super) fn commit_for_caller(
        &self,
        state: &mut State,
        statement: Statement,
        effect: Effect,
    ) -> Answer {
        match statement {
            Statement::Insert { run } => self.commit_insert(state, run, effect),
            Statement::Cancel { run } => match &mut state.runs[run].live {
                Some(live) if live.assignment.is_some() => {
                    live.canceled_in = live.canceled_in.or(Some(live.attempt));
                }
                _ => end_runs(state, bit(run), Outcome::Canceled),
            },
            Statement::Close { session } => commit_close(state, session, effect),
            _ => {}
        }
        Answer::Done
    }

    fn commit_insert(
        &self,
        state: &mut State,
        run: usize,
        Effect { assignment, waits, .. }: Effect,
    ) {
        state.runs[run].live = Some(LiveRun { assignment, attempt: 1, turn: 0, canceled_in: None });
        state.past.recorded |= bit(run);
        state.sessions[self.session_of(run)].is_waiting |= waits;
        if self.bounds.same_key {
            state.key = Some(run);
        }
        // The api may push it once, several times, or never.
        let push = assignment.map(|assignment| Push { assignment, copies: self.bounds.pushes });
        state.pushes[run] = push.filter(|push| push.copies > 0);
    }

    /// The effect of a worker's statement about a run.
    pub(super) fn run_effect(
        &self,
        state: &State,
        by: Incarnation,
        statement: Statement,
    ) -> Result<Effect, Answer> {
        let allow = |run: usize, is_allowed: bool| {
            if is_allowed {
                Ok(Effect { runs: bit(run), ..Effect::default() })
            } else {
                Err(Answer::Refused)
            }
        };
        match statement {
            Statement::Begin { run, epoch } => {
                let row = state.sessions[self.session_of(run)];
                let is_held = row.is_open() && row.is_held_under(assignment(by, epoch));
                allow(run, state.is_queued(run) && is_held && state.has_live_lease(by))
            }
            Statement::HandBack { run, turn } => {
                let Some(live) = state.runs[run].live else { return Err(Answer::Refused) };
                let same_turn = live.turn == turn || self.is(Variant::NoTurnGuard);
                let is_assigned = live.assignment.is_some_and(|of| of.incarnation == by);
                let ends_run = !state.sessions[self.session_of(run)].is_open();
                let session = self.session_of(run);
                let sessions = bit(session);
                let waits = state.live_holder(session).is_none();
                allow(run, is_assigned && same_turn).map(|effect| Effect {
                    sessions,
                    ends_run,
                    waits,
                    ..effect
                })
            }
            Statement::Append { run, epoch, .. } => {
                let is_guarded = !self.is(Variant::UnguardedAppend);
                allow(
                    run,
                    !is_guarded || self.runs_under_live_lease(state, run, assignment(by, epoch)),
                )
            }
            Statement::Commit { run, epoch, .. } => {
                let under = assignment(by, epoch);
                // Repeated after the first answer was lost: the history has it.
                if state.runs[run].ended.is_some_and(|ended| ended.by == Some(under)) {
                    return Err(Answer::Done);
                }
                let is_unguarded =
                    self.is(Variant::NoCommitGuard) && state.assignment(run).is_some();
                allow(run, is_unguarded || self.runs_under_live_lease(state, run, under))
            }
            Statement::Abandon { run, epoch } => {
                allow(run, state.assignment(run) == Some(assignment(by, epoch)))
            }
            _ => Err(Answer::Refused),
        }
    }

    /// Whether a run is running under a lease that is live and that no other worker replaced.
    fn runs_under_live_lease(&self, state: &State, run: usize, under: Assignment) -> bool {
        let row = state.sessions[self.session_of(run)];
        let is_held = row.is_held_under(under) && state.has_live_lease(under.incarnation);
        state.assignment(run) == Some(under) && is_held
    }

    pub(super) fn commit_run(
        &self,
        state: &mut State,
        by: Incarnation,
        statement: Statement,
        effect: Effect,
    ) -> Answer {
        match statement {
            Statement::Begin { run, epoch } => {
                if let Some(live) = &mut state.runs[run].live {
                    live.assignment = Some(assignment(by, epoch));
                    live.turn += 1;
                    return Answer::Begun {
                        turn: live.turn,
                        is_canceled: live.canceled_in.is_some(),
                    };
                }
            }
            Statement::HandBack { run, .. } if effect.ends_run => {
                end_runs(state, bit(run), Outcome::Canceled)
            }
            Statement::HandBack { run, .. } => {
                state.runs[run].live.iter_mut().for_each(|live| live.assignment = None);
                state.sessions[self.session_of(run)].is_waiting |= effect.waits;
            }
            Statement::Append { run, start, .. } => state.runs[run].output |= bit(start.into()),
            Statement::Commit { run, epoch, result } => {
                if self.is(Variant::EndInTwoStatements) && state.runs[run].live.is_some() {
                    state.runs[run].live = None;
                    return Answer::Done;
                }
                let outcome = if result.is_canceled { Outcome::Canceled } else { Outcome::Exited };
                if result.start > 0 {
                    state.runs[run].output |= bit(result.start.into());
                }
                end_run(
                    state,
                    run,
                    EndedRun { outcome, by: Some(assignment(by, epoch)), start: result.start },
                );
            }
            Statement::Abandon { run, .. } => end_runs(state, bit(run), Outcome::Lost),
            _ => {}
        }
        Answer::Done
    }

    /// Notes a commit that is allowed without a lease.
    pub(super) fn record_stale_commit(
        &self,
        state: &mut State,
        call: &Call,
        effect: &Result<Effect, Answer>,
    ) {
        let (Statement::Commit { run, epoch, .. }, Some(by)) = (call.statement, call.incarnation())
        else {
            return;
        };
        if effect.is_ok() {
            state.past.stale_commit |=
                !self.runs_under_live_lease(state, run, assignment(by, epoch));
        }
    }
}
