//! A worker: what it believes, decides and does (`crates/worker`).

use crate::{
    protocol::{Protocol, Variant},
    state::{Holding, Life, Local, MARGIN, Pause, State, TTL, Worker},
    statement::{Answer, Flight, Stage, Statement},
};

impl State {
    /// A worker's own clock.
    pub(crate) fn clock(&self, worker: usize) -> u8 {
        self.now.saturating_sub(self.workers[worker].lag)
    }

    /// Whether a worker believes that its lease is live, when it looks.
    pub(crate) fn believes(&self, worker: usize) -> bool {
        self.workers[worker].life > 0 && self.clock(worker) < self.workers[worker].valid_until
    }

    pub(crate) fn life(&self, worker: usize) -> Life {
        Life { worker: number(worker), number: self.workers[worker].life }
    }

    /// Whether a worker waits for the answer to such a statement.
    pub(crate) fn awaits(&self, worker: usize, is: impl Fn(Statement) -> bool) -> bool {
        self.flights.iter().any(|flight| {
            flight.is_awaited && usize::from(flight.by.worker) == worker && is(flight.statement)
        })
    }

    pub(crate) fn send(&mut self, by: Life, statement: Statement) {
        let stage = Stage::Sent;
        self.flights.push(Flight { statement, by, stage, is_awaited: true, is_slow: false, is_old: false });
    }

    /// A life is over: its commands are killed, and it hears of nothing it asked for.
    pub(crate) fn end_life(&mut self, worker: usize) {
        let number = number(worker);
        let now = &mut self.workers[worker];
        now.life = 0;
        now.valid_until = 0;
        now.is_dazed = false;
        now.holding = Holding::Not;
        now.runs.fill(Local::Unknown);
        let mine = |flight: &Flight| flight.by.worker == number && !flight.is_insert();
        self.flights.retain(|flight| !(mine(flight) && matches!(flight.stage, Stage::Answered(_))));
        self.flights.iter_mut().filter(|flight| mine(flight)).for_each(|flight| flight.is_awaited = false);
    }

    pub(crate) fn register(&mut self, worker: usize) {
        let row = &mut self.rows[worker];
        row.life += 1;
        row.lease_until = self.now + TTL;
        row.is_ready = true;
        row.is_gone = false;
        let life = row.life;
        let valid_until = self.clock(worker) + TTL - MARGIN;
        let now = &mut self.workers[worker];
        now.life = life;
        now.valid_until = valid_until;
    }
}

impl Worker {
    pub(crate) fn acts(&self) -> bool {
        self.is_up && self.pause == Pause::No
    }
}

impl Protocol {
    /// A worker hears an answer.
    pub(crate) fn hear(&self, state: &mut State, flight: Flight, answer: Answer) {
        let worker = usize::from(flight.by.worker);
        let set = |state: &mut State, run: usize, local| state.workers[worker].runs[run] = local;
        match (flight.statement, answer) {
            (Statement::Insert { .. }, _) => {}
            (Statement::Renew { sent }, Answer::Done(_))
                if state.believes(worker)
                    || self.is(Variant::SecondThoughts)
                    || self.is(Variant::NoSelfFencing) =>
            {
                state.workers[worker].valid_until = sent + TTL - MARGIN;
                // An answer from before a pause tells nothing of what came after.
                state.workers[worker].is_dazed &= flight.is_old;
            }
            (Statement::Renew { .. }, _) => state.end_life(worker),
            (Statement::Acquire, Answer::Done(epoch)) => state.workers[worker].holding = Holding::Held(epoch),
            (Statement::Acquire, _) => {}
            (Statement::Release { .. }, Answer::Busy) => {}
            (Statement::Release { .. }, _) => state.workers[worker].holding = Holding::Not,
            (Statement::Begin { run, epoch }, Answer::Done(turn)) => {
                set(state, run, Local::Claimed { epoch, turn });
            }
            (Statement::Begin { run, .. }, _) => set(state, run, Local::Left),
            (Statement::HandBack { run, .. }, _) => set(state, run, Local::HandedBack),
            (Statement::Commit { run, .. }, _) => set(state, run, Local::Ended),
        }
    }

    /// A worker hears that its connection broke: what it asked for may be done or not.
    pub(crate) fn fail(&self, state: &mut State, flight: Flight) {
        if let Statement::Begin { run, .. } = flight.statement {
            state.workers[usize::from(flight.by.worker)].runs[run] = Local::Left;
        }
    }

    /// Makes sure that a run may be started.
    pub(crate) fn clear(&self, state: &mut State, worker: usize, run: usize) {
        let Local::Claimed { epoch, turn } = state.workers[worker].runs[run] else { return };
        let holds = state.workers[worker].holding == Holding::Held(epoch);
        let believes = state.believes(worker) || self.is(Variant::NoSelfFencing);
        state.workers[worker].runs[run] = match (believes, holds) {
            (true, true) => Local::Cleared { epoch },
            (true, false) => Local::HandingBack { turn },
            (false, _) if self.is(Variant::SecondThoughts) => Local::Ended,
            // Who sees first that the lease is over ends the life for all.
            (false, _) => return state.end_life(worker),
        };
    }

    /// The poll finds a run that is recorded for this life.
    pub(crate) fn take_assigned(&self, state: &mut State, worker: usize, run: usize, epoch: u8) {
        let turn = state.runs[run].turn;
        let now = &state.workers[worker];
        let may = now.holding == Holding::Held(epoch) && !now.is_draining;
        state.workers[worker].runs[run] =
            if may { Local::Claimed { epoch, turn } } else { Local::HandingBack { turn } };
    }

    /// A push arrives: a hint that the worker's memory may overrule.
    pub(crate) fn take_push(&self, state: &mut State, run: usize, is_full: bool) {
        let Some(push) = &mut state.pushes[run] else { return };
        push.copies -= 1;
        let claim = push.claim;
        if push.copies == 0 {
            state.pushes[run] = None;
        }
        let worker = usize::from(claim.life.worker);
        let now = &state.workers[worker];
        let forgets = self.is(Variant::NoPushMemory) && !now.runs[run].is_active();
        let is_known = now.runs[run] != Local::Unknown && !forgets;
        let is_ours = now.life == claim.life.number && now.holding == Holding::Held(claim.epoch);
        if is_known || !is_ours || !state.believes(worker) {
            return;
        }
        let goes_back = is_full || now.is_draining;
        // A push tells of the turn that the insert began.
        let (epoch, turn) = (claim.epoch, 0);
        state.workers[worker].runs[run] =
            if goes_back { Local::HandingBack { turn } } else { Local::Claimed { epoch, turn } };
    }

    pub(crate) fn leave(&self, state: &mut State, worker: usize) {
        state.rows[worker].lease_until = state.now;
        state.rows[worker].is_gone = true;
        state.end_life(worker);
        state.workers[worker].is_up = false;
    }
}

pub(crate) fn number(worker: usize) -> u8 {
    u8::try_from(worker).unwrap_or(u8::MAX)
}
