//! The database: what each statement looks at, and what it changes (`crates/store`).
//!
//! A statement looks at everything when it is executed and holds its row from then on. What it saw of
//! other rows may be out of date when it is committed; its own row is not.

use crate::{
    protocol::{Protocol, Variant},
    state::{Claim, Life, Push, RunState, State, TTL},
    statement::{Answer, Flight, Lock, Stage, Statement},
};

impl State {
    /// Whether a life's lease has not run out.
    pub(crate) fn is_alive(&self, life: Life) -> bool {
        let row = self.rows[usize::from(life.worker)];
        row.life == life.number && row.lease_until > self.now && !row.is_gone
    }

    /// Whether a life is over for good: another has begun, or its lease was found to have run out.
    pub(crate) fn is_gone(&self, life: Life) -> bool {
        let row = self.rows[usize::from(life.worker)];
        row.life != life.number || row.is_gone
    }

    fn holds(&self, claim: Claim) -> bool {
        self.session.holder == Some(claim.life) && self.session.epoch == claim.epoch
    }

    pub(crate) fn live_holder(&self) -> Option<Life> {
        self.session.holder.filter(|holder| self.is_alive(*holder))
    }

    pub(crate) fn is_locked(&self, lock: Lock) -> bool {
        self.flights.iter().any(|flight| flight.holds(lock))
    }
}

impl Protocol {
    /// Marks the workers whose lease has run out, so that nothing on its way can renew it. A row
    /// that is being renewed is waited for.
    fn mark_gone(&self, state: &mut State) {
        for worker in 0..state.rows.len() {
            let is_locked = state.is_locked(Lock::Worker(crate::worker::number(worker)));
            if state.rows[worker].lease_until <= state.now && (!is_locked || self.is(Variant::UnmarkedDeath))
            {
                state.rows[worker].is_gone = !self.is(Variant::UnmarkedDeath);
            }
        }
    }

    /// Whether whoever has this life may be taken for dead.
    fn may_replace(&self, state: &State, life: Life) -> bool {
        state.is_gone(life) || (self.is(Variant::UnmarkedDeath) && !state.is_alive(life))
    }

    /// Whether a statement has to wait for somebody else's lock.
    pub(crate) fn must_wait(&self, state: &State, flight: &Flight) -> bool {
        match flight.lock() {
            Lock::Session => {
                state.is_locked(Lock::Session)
                    || (!self.is(Variant::UnlockedInsert) && state.is_locked(Lock::SessionShared))
            }
            Lock::SessionShared => !self.is(Variant::UnlockedInsert) && state.is_locked(Lock::Session),
            lock => state.is_locked(lock),
        }
    }

    /// Executes a statement: it looks, and takes its lock, or is refused.
    pub(crate) fn execute(&self, state: &mut State, index: usize) {
        let flight = state.flights[index];
        if flight.statement == Statement::Acquire {
            self.mark_gone(state);
        }
        let refusal = self.refusal(state, &flight);
        if let Statement::Commit { run, epoch } = flight.statement
            && refusal.is_none()
        {
            let claim = flight.claim(epoch);
            let is_right = state.runs[run].state == RunState::Running(claim) && state.holds(claim);
            state.seen.stale_commit |= !(is_right && state.is_alive(flight.by));
        }
        state.flights[index].stage = match refusal {
            Some(answer) => Stage::Answered(answer),
            None => Stage::Executed {
                at: if matches!(flight.statement, Statement::Renew { .. }) { state.now } else { 0 },
                claim: self.holder_for(state, flight.statement),
            },
        };
    }

    /// The ready holder that an insert records its run for.
    fn holder_for(&self, state: &State, statement: Statement) -> Option<Claim> {
        let Statement::Insert { .. } = statement else { return None };
        let life = state.live_holder().filter(|life| state.rows[usize::from(life.worker)].is_ready)?;
        Some(Claim { life, epoch: state.session.epoch })
    }

    fn refusal(&self, state: &State, flight: &Flight) -> Option<Answer> {
        let lives = state.is_alive(flight.by);
        let run_state = |run: usize| state.runs[run].state;
        let may = match flight.statement {
            Statement::Insert { .. } => true,
            Statement::Renew { .. } => lives,
            Statement::Acquire => {
                let is_free = state.session.holder.is_none_or(|holder| self.may_replace(state, holder));
                lives && state.rows[usize::from(flight.by.worker)].is_ready && is_free
            }
            Statement::Release { epoch } => {
                let busy = state.runs.iter().any(|run| matches!(run.state, RunState::Running(_)));
                if state.holds(flight.claim(epoch)) && busy {
                    return Some(Answer::Busy);
                }
                state.holds(flight.claim(epoch))
            }
            Statement::Begin { run, epoch } => {
                run_state(run) == RunState::Queued && state.holds(flight.claim(epoch)) && lives
            }
            Statement::HandBack { run, turn } => {
                let same_turn = state.runs[run].turn == turn || self.is(Variant::AnyTurn);
                matches!(run_state(run), RunState::Running(claim) if claim.life == flight.by) && same_turn
            }
            Statement::Commit { run, epoch } => {
                let claim = flight.claim(epoch);
                match run_state(run) {
                    RunState::Running(_) if self.is(Variant::NoEpochGuard) => true,
                    RunState::Running(of) => of == claim && state.holds(claim) && lives,
                    // Asked again after its answer was lost.
                    RunState::Exited(by) if by == claim => return Some(Answer::Done(0)),
                    _ => false,
                }
            }
        };
        (!may).then_some(Answer::Refused)
    }

    /// Commits a statement: its effect is there for everybody.
    pub(crate) fn commit(&self, state: &mut State, index: usize) {
        let flight = state.flights[index];
        let Stage::Executed { at, claim } = flight.stage else { return };
        let mut number = 0;
        match flight.statement {
            Statement::Insert { run } => self.record(state, run, claim),
            Statement::Renew { .. } => state.rows[usize::from(flight.by.worker)].lease_until = at + TTL,
            Statement::Acquire => {
                state.session.holder = Some(flight.by);
                state.session.epoch += 1;
                number = state.session.epoch;
                self.resolve_orphans(state);
            }
            Statement::Release { .. } => state.session.holder = None,
            Statement::Begin { run, epoch } => {
                state.runs[run].state = RunState::Running(flight.claim(epoch));
                state.runs[run].turn += 1;
                number = state.runs[run].turn;
            }
            Statement::HandBack { run, .. } => state.runs[run].state = RunState::Queued,
            Statement::Commit { run, epoch } => {
                state.runs[run].state = RunState::Exited(flight.claim(epoch));
                state.seen.endings[run] += 1;
            }
        }
        state.flights[index].stage = Stage::Answered(Answer::Done(number));
    }

    fn record(&self, state: &mut State, run: usize, claim: Option<Claim>) {
        state.runs[run].state = claim.map_or(RunState::Queued, RunState::Running);
        // The api may push it, may die before, may push it again.
        state.pushes[run] = claim.map(|claim| Push { claim, copies: self.bounds.pushes });
    }

    /// Ends the lease of a worker that is gone, and its runs. Any api or worker does it.
    pub(crate) fn sweep(&self, state: &mut State) {
        self.mark_gone(state);
        let is_free = !state.is_locked(Lock::Session) && !state.is_locked(Lock::SessionShared);
        if is_free && state.session.holder.is_some_and(|holder| self.may_replace(state, holder)) {
            state.session.holder = None;
        }
        self.resolve_orphans(state);
    }

    /// Runs whose worker is gone: queued again if their caller allowed it, else lost. One that is
    /// locked is being committed.
    fn resolve_orphans(&self, state: &mut State) {
        for run in 0..state.runs.len() {
            let RunState::Running(claim) = state.runs[run].state else { continue };
            if !self.may_replace(state, claim.life) || state.is_locked(Lock::Run(run)) {
                continue;
            }
            let asked = state.runs[run].attempt <= self.bounds.retries[run];
            if asked || (self.is(Variant::UnaskedRetry) && state.runs[run].attempt < 2) {
                state.runs[run].state = RunState::Queued;
                state.runs[run].attempt += 1;
            } else {
                state.runs[run].state = RunState::Lost;
                state.seen.endings[run] += 1;
            }
        }
    }
}
