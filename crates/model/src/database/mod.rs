//! The database: what each statement checks and changes, as in `crates/store`.
//!
//! A statement reads everything when it is executed and locks the rows that it changes until it is
//! committed. The other rows that it read may change before that.

mod lease;
mod locks;
mod run;
mod session;
mod sweep;

use crate::{
    protocol::{Protocol, Variant},
    state::{Incarnation, State},
    statement::{Answer, Call, Effect, Sender, Stage, Statement},
};

impl State {
    /// Whether the lease of an incarnation is live.
    pub(crate) fn has_live_lease(&self, incarnation: Incarnation) -> bool {
        let row = self.rows[incarnation.worker];
        row.incarnation == incarnation.number && row.lease_until > self.now && !row.is_gone
    }

    /// The live holder of a session.
    pub(crate) fn live_holder(&self, session: usize) -> Option<Incarnation> {
        self.sessions[session].holder.filter(|holder| self.has_live_lease(*holder))
    }

    pub(crate) fn send(&mut self, by: Sender, statement: Statement) {
        self.calls.push(Call {
            statement,
            by,
            stage: Stage::Sent,
            is_awaited: true,
            is_slow: false,
            predates_fault: false,
        });
    }
}

impl Protocol {
    /// Executes a statement: it checks its conditions and takes its locks, or is refused.
    pub(crate) fn execute(&self, state: &mut State, index: usize) {
        let call = state.calls[index];
        let effect = self.effect(state, &call);
        self.record_stale_commit(state, &call, &effect);
        state.calls[index].stage = effect.map_or_else(Stage::Answered, Stage::Executed);
    }

    /// Whether a call must wait for a lock of another one.
    pub(crate) fn must_wait(&self, state: &State, call: &Call) -> bool {
        self.effect(state, call).is_ok_and(|effect| self.conflicts(state, call, &effect))
    }

    /// The effect that a statement would have now, or the answer if it changes nothing.
    pub(crate) fn effect(&self, state: &State, call: &Call) -> Result<Effect, Answer> {
        let statement = call.statement;
        match call.by {
            Sender::Caller => self.caller_effect(state, statement),
            Sender::Upkeep(_) => self.upkeep_effect(state, statement),
            Sender::Worker(by) => match statement {
                Statement::Register { .. } | Statement::Renew { .. } | Statement::Leave => {
                    self.worker_row_effect(state, by, statement)
                }
                Statement::Acquire { session } => self.acquire_effect(state, by, session),
                Statement::Release { .. }
                | Statement::EndDataLost { .. }
                | Statement::MarkRemoved { .. } => self.session_effect(state, by, statement),
                _ => self.run_effect(state, by, statement),
            },
        }
    }

    /// Commits a statement: others see its effect. Nothing depends on the answer to a caller or to
    /// the upkeep.
    pub(crate) fn commit(&self, state: &mut State, index: usize) {
        let call = state.calls[index];
        let Stage::Executed(effect) = call.stage else { return };
        let answer = match call.by {
            Sender::Caller => self.commit_for_caller(state, call.statement, effect),
            Sender::Upkeep(_) => self.commit_upkeep(state, call.statement, effect),
            Sender::Worker(by) => self.commit_for_worker(state, by, call.statement, effect),
        };
        if self.is(Variant::EndInTwoStatements)
            && let Statement::Commit { run, .. } = call.statement
            && state.runs[run].ended.is_none()
        {
            return;
        }
        state.calls[index].stage = Stage::Answered(answer);
        if self.is(Variant::OneSnapshotCommit) {
            refuse_waiting_commits(state, call.statement);
        }
    }

    fn commit_for_worker(
        &self,
        state: &mut State,
        by: Incarnation,
        statement: Statement,
        effect: Effect,
    ) -> Answer {
        match statement {
            Statement::Register { number, .. } => {
                lease::commit_register(state, by.worker, number, effect)
            }
            Statement::Renew { .. } | Statement::Leave => {
                lease::commit_worker_row(state, by.worker, statement, effect)
            }
            Statement::Acquire { session } => {
                return self.commit_acquire(state, by, session, effect);
            }
            Statement::Release { session, .. } => {
                state.sessions[session].holder = None;
                self.mark_waiting(state, session);
            }
            Statement::EndDataLost { session, .. } => {
                session::commit_data_lost(state, session, effect)
            }
            Statement::MarkRemoved { session } => {
                state.sessions[session].is_removed = true;
                state.sessions[session].holder = None;
            }
            _ => return self.commit_run(state, by, statement, effect),
        }
        Answer::Done
    }
}

/// Refuses the commits of a run that wait for the one that was just committed: their snapshots show
/// it neither as running nor as ended.
fn refuse_waiting_commits(state: &mut State, committed: Statement) {
    for call in &mut state.calls {
        if call.stage == Stage::Sent && call.statement == committed {
            call.stage = Stage::Answered(Answer::Refused);
        }
    }
}
