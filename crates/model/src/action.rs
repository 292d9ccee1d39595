//! What can happen next, and what it does.

use crate::{
    protocol::{Protocol, Variant},
    state::{Holding, Life, Local, MARGIN, Pause, RunState, State, TTL, WORKERS},
    statement::{Lock, Stage, Statement},
};

/// One step of the world, of a worker or of the database. Workers and runs are numbers; a flight is a
/// place in the list of statements on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it; each is one step")]
pub enum Action {
    Tick,
    Crash {
        worker: usize,
    },
    Pause {
        worker: usize,
        clock_stops: bool,
    },
    /// A tick that a worker's clock misses.
    Lag {
        worker: usize,
    },
    /// The connection breaks; the statement is lost, or goes on unheard.
    Cut {
        flight: usize,
        is_lost: bool,
    },
    Drain {
        worker: usize,
    },
    CutOff {
        worker: usize,
    },
    Reconnect {
        worker: usize,
    },
    Resume {
        worker: usize,
    },
    Restart {
        worker: usize,
    },
    Insert {
        run: usize,
    },
    Push {
        run: usize,
        is_full: bool,
    },
    Sweep,
    /// A slow statement is executed, committed, or heard of.
    GoOn {
        flight: usize,
    },
    Register {
        worker: usize,
    },
    Renew {
        worker: usize,
    },
    Fence {
        worker: usize,
    },
    Acquire {
        worker: usize,
    },
    /// The poll finds the session recorded for a life that does not know it holds it, or drains.
    Release {
        worker: usize,
        epoch: u8,
    },
    Leave {
        worker: usize,
    },
    TakeAssigned {
        worker: usize,
        run: usize,
        epoch: u8,
    },
    TakeQueued {
        worker: usize,
        run: usize,
        epoch: u8,
    },
    Clear {
        worker: usize,
        run: usize,
    },
    Launch {
        worker: usize,
        run: usize,
    },
    End {
        worker: usize,
        run: usize,
    },
    SendCommit {
        worker: usize,
        run: usize,
        epoch: u8,
    },
    SendHandBack {
        worker: usize,
        run: usize,
        turn: u8,
    },
}

/// A step, and whether the statement it sends takes its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The step.
    pub action: Action,
    /// Whether anything may happen until its statement is answered.
    pub is_slow: bool,
}

impl From<Action> for Event {
    fn from(action: Action) -> Self {
        Self { action, is_slow: false }
    }
}

impl Action {
    /// Whether it sends a statement.
    pub(crate) fn sends(self) -> bool {
        matches!(
            self,
            Self::Insert { .. }
                | Self::Renew { .. }
                | Self::Acquire { .. }
                | Self::Release { .. }
                | Self::TakeQueued { .. }
                | Self::SendCommit { .. }
                | Self::SendHandBack { .. }
        )
    }
}

impl Protocol {
    /// Time goes on unless a worker has yet to do what its clock tells it: to renew, or to kill
    /// what it runs, which takes less than a tick.
    pub(crate) fn time(&self, state: &State, actions: &mut Vec<Action>) {
        let must_act = |worker| self.must_fence(state, worker) || must_renew(state, worker);
        if (0..WORKERS).any(must_act) {
            return;
        }
        actions.push(Action::Tick);
        if state.left.lags > 0 {
            actions.extend((0..WORKERS).map(|worker| Action::Lag { worker }));
        }
    }

    fn must_fence(&self, state: &State, worker: usize) -> bool {
        let now = &state.workers[worker];
        now.acts() && now.life > 0 && !state.believes(worker) && !self.is(Variant::NoSelfFencing)
    }

    pub(crate) fn faults(&self, state: &State, actions: &mut Vec<Action>) {
        for (worker, now) in state.workers.iter().enumerate().filter(|(_, now)| now.acts() && now.life > 0) {
            if state.left.crashes > 0 {
                actions.push(Action::Crash { worker });
            }
            if state.left.pauses > 0 {
                actions.extend([false, true].map(|clock_stops| Action::Pause { worker, clock_stops }));
            }
            if state.left.partitions > 0 && !now.is_cut_off {
                actions.push(Action::CutOff { worker });
            }
            if state.left.drains > 0 && !now.is_draining {
                actions.push(Action::Drain { worker });
            }
        }
        if state.left.cuts == 0 {
            return;
        }
        for (index, flight) in state.flights.iter().enumerate().filter(|(_, flight)| flight.is_awaited) {
            match flight.stage {
                Stage::Sent => {
                    actions.extend([false, true].map(|is_lost| Action::Cut { flight: index, is_lost }));
                }
                Stage::Executed { .. } => actions.push(Action::Cut { flight: index, is_lost: false }),
                Stage::Answered(_) => actions.push(Action::Cut { flight: index, is_lost: true }),
            }
        }
    }

    /// All that happens without a fault and without time.
    pub(crate) fn steps(&self, state: &State, actions: &mut Vec<Action>) {
        self.network(state, actions);
        for worker in 0..WORKERS {
            self.process(state, worker, actions);
        }
        for run in 0..state.runs.len() {
            let is_new = !state.flights.iter().any(|flight| flight.statement == Statement::Insert { run });
            if state.runs[run].state == RunState::Absent && is_new {
                actions.push(Action::Insert { run });
            }
        }
        let mut swept = state.clone();
        self.sweep(&mut swept);
        if swept != *state {
            actions.push(Action::Sweep);
        }
    }

    fn network(&self, state: &State, actions: &mut Vec<Action>) {
        let can = |flight: &usize| self.can_go_on(state, *flight);
        actions.extend((0..state.flights.len()).filter(can).map(|flight| Action::GoOn { flight }));
        for (run, push) in state.pushes.iter().enumerate() {
            let Some(push) = push else { continue };
            if state.workers[usize::from(push.claim.life.worker)].acts() {
                actions.push(Action::Push { run, is_full: false });
                if state.left.full > 0 {
                    actions.push(Action::Push { run, is_full: true });
                }
            }
        }
    }

    fn process(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if now.is_cut_off {
            actions.push(Action::Reconnect { worker });
        }
        if now.pause != Pause::No {
            return actions.push(Action::Resume { worker });
        }
        if !now.is_up {
            return actions.push(Action::Restart { worker });
        }
        if now.life == 0 {
            if !now.is_cut_off && !state.is_locked(Lock::Worker(crate::worker::number(worker))) {
                actions.push(Action::Register { worker });
            }
            return;
        }
        if self.must_fence(state, worker) {
            actions.push(Action::Fence { worker });
        }
        self.lease(state, worker, actions);
        for run in 0..state.runs.len() {
            self.run(state, worker, run, actions);
        }
    }

    fn lease(&self, state: &State, worker: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if must_renew(state, worker) {
            actions.push(Action::Renew { worker });
        }
        let is_changing = state
            .awaits(worker, |statement| matches!(statement, Statement::Acquire | Statement::Release { .. }));
        let is_busy = now.runs.iter().any(|run| run.is_active());
        let holds = state.session.holder == Some(state.life(worker));
        match now.holding {
            _ if is_changing || now.is_cut_off => {}
            Holding::Not if now.is_draining && !holds && !is_busy => actions.push(Action::Leave { worker }),
            Holding::Not if holds => actions.push(Action::Release { worker, epoch: state.session.epoch }),
            Holding::Not if state.believes(worker) && state.live_holder().is_none() && !now.is_draining => {
                actions.push(Action::Acquire { worker });
            }
            Holding::Held(epoch) if now.is_draining && !is_busy => {
                actions.push(Action::Release { worker, epoch })
            }
            Holding::Releasing(epoch) => actions.push(Action::Release { worker, epoch }),
            Holding::Not | Holding::Held(_) => {}
        }
    }

    fn run(&self, state: &State, worker: usize, run: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        let sends = |is: fn(Statement) -> Option<usize>| {
            !state.awaits(worker, |statement| is(statement) == Some(run))
        };
        match now.runs[run] {
            Local::Claimed { .. } => actions.push(Action::Clear { worker, run }),
            Local::Cleared { .. } => actions.push(Action::Launch { worker, run }),
            Local::Living { .. } => actions.push(Action::End { worker, run }),
            Local::Done { epoch } if sends(committed) => {
                actions.push(Action::SendCommit { worker, run, epoch })
            }
            Local::HandingBack { turn } if sends(handed_back) => {
                actions.push(Action::SendHandBack { worker, run, turn });
            }
            Local::Unknown | Local::Left | Local::HandedBack => self.poll(state, worker, run, actions),
            Local::Done { .. } | Local::HandingBack { .. } | Local::Beginning | Local::Ended => {}
        }
    }

    /// What the poll finds of a run.
    fn poll(&self, state: &State, worker: usize, run: usize, actions: &mut Vec<Action>) {
        let now = &state.workers[worker];
        if now.is_cut_off || !state.believes(worker) {
            return;
        }
        match state.runs[run].state {
            RunState::Running(claim)
                if claim.life == state.life(worker) && now.runs[run] != Local::HandedBack =>
            {
                let is_changing = state.awaits(worker, |statement| statement == Statement::Acquire);
                if !is_changing || now.is_draining {
                    actions.push(Action::TakeAssigned { worker, run, epoch: claim.epoch });
                }
            }
            RunState::Queued if state.session.holder == Some(state.life(worker)) && !now.is_draining => {
                if let Holding::Held(epoch) = now.holding {
                    actions.push(Action::TakeQueued { worker, run, epoch });
                }
            }
            _ => {}
        }
    }

    /// Makes one step, and at once all steps of statements that are not slow.
    pub(crate) fn apply(&self, state: &mut State, Event { action, is_slow }: Event) {
        let before = state.flights.len();
        self.act(state, action);
        if is_slow && let Some(sent) = state.flights.get_mut(before) {
            state.left.slow -= 1;
            sent.is_slow = true;
            // A lease may be lost by it.
            state.seen.faulty |= matches!(action, Action::Renew { .. });
        }
        self.hurry(state);
    }

    fn act(&self, state: &mut State, action: Action) {
        match action {
            Action::Tick => tick(state),
            Action::Crash { .. }
            | Action::Pause { .. }
            | Action::Lag { .. }
            | Action::CutOff { .. }
            | Action::Cut { .. } => {
                state.seen.faulty = true;
                self.apply_fault(state, action);
            }
            Action::Reconnect { worker } => state.workers[worker].is_cut_off = false,
            Action::Drain { worker } => {
                state.left.drains -= 1;
                state.workers[worker].is_draining = true;
                state.rows[worker].is_ready = false;
            }
            Action::Resume { worker } => {
                let froze = state.workers[worker].pause == Pause::Frozen;
                state.workers[worker].pause = Pause::No;
                state.workers[worker].is_dazed = froze || !state.believes(worker);
            }
            Action::Restart { worker } => {
                state.workers[worker].is_up = true;
                state.workers[worker].is_draining = false;
                state.workers[worker].lag = 0;
            }
            Action::Insert { run } => state.send(Life { worker: 0, number: 0 }, Statement::Insert { run }),
            Action::Push { run, is_full } => {
                state.left.full -= u8::from(is_full);
                self.take_push(state, run, is_full);
            }
            Action::Sweep => self.sweep(state),
            Action::GoOn { flight } => self.go_on(state, flight),
            _ => self.apply_work(state, action),
        }
    }

    /// Makes the steps of statements that are not slow.
    fn hurry(&self, state: &mut State) {
        loop {
            // What nobody waits for is over when it is answered.
            state.flights.retain(|flight| {
                (flight.is_awaited && !flight.is_insert()) || !matches!(flight.stage, Stage::Answered(_))
            });
            let can = |flight: usize| !state.flights[flight].is_slow && self.can_go_on(state, flight);
            match (0..state.flights.len()).find(|flight| can(*flight)) {
                Some(flight) => self.go_on(state, flight),
                None => return,
            }
        }
    }

    /// Whether a statement can make its next step.
    fn can_go_on(&self, state: &State, flight: usize) -> bool {
        let flight = &state.flights[flight];
        let worker = &state.workers[usize::from(flight.by.worker)];
        let passes = flight.is_insert() || !flight.is_awaited || !worker.is_cut_off;
        match flight.stage {
            Stage::Sent => passes && !self.must_wait(state, flight),
            Stage::Executed { .. } => true,
            Stage::Answered(_) => passes && worker.acts(),
        }
    }

    fn go_on(&self, state: &mut State, flight: usize) {
        match state.flights[flight].stage {
            Stage::Sent => self.execute(state, flight),
            Stage::Executed { .. } => self.commit(state, flight),
            Stage::Answered(answer) => {
                let flight = state.flights.remove(flight);
                self.hear(state, flight, answer);
            }
        }
    }

    fn apply_fault(&self, state: &mut State, action: Action) {
        match action {
            Action::Crash { worker } => {
                state.left.crashes -= 1;
                state.end_life(worker);
                state.workers[worker].is_up = false;
            }
            Action::Pause { worker, clock_stops } => {
                state.left.pauses -= 1;
                state.workers[worker].pause = if clock_stops { Pause::Frozen } else { Pause::Stopped };
                state.workers[worker].is_dazed = true;
                let number = crate::worker::number(worker);
                let sent = state.flights.iter_mut().filter(|flight| flight.by.worker == number);
                sent.for_each(|flight| flight.is_old = true);
            }
            Action::CutOff { worker } => {
                state.left.partitions -= 1;
                state.workers[worker].is_cut_off = true;
            }
            Action::Lag { worker } => {
                state.left.lags -= 1;
                state.workers[worker].lag += 1;
                tick(state);
            }
            Action::Cut { flight, is_lost } => {
                state.left.cuts -= 1;
                let cut = state.flights[flight];
                self.fail(state, cut);
                state.flights[flight].is_awaited = false;
                if is_lost {
                    state.flights.remove(flight);
                }
            }
            _ => {}
        }
    }

    fn apply_work(&self, state: &mut State, action: Action) {
        match action {
            Action::Register { worker } => state.register(worker),
            Action::Renew { worker } => {
                let sent = state.clock(worker);
                state.send(state.life(worker), Statement::Renew { sent });
            }
            Action::Fence { worker } => state.end_life(worker),
            Action::Acquire { worker } => state.send(state.life(worker), Statement::Acquire),
            Action::Release { worker, epoch } => {
                state.workers[worker].holding = Holding::Releasing(epoch);
                state.send(state.life(worker), Statement::Release { epoch });
            }
            Action::Leave { worker } => self.leave(state, worker),
            Action::TakeAssigned { worker, run, epoch } => self.take_assigned(state, worker, run, epoch),
            Action::TakeQueued { worker, run, epoch } => {
                state.workers[worker].runs[run] = Local::Beginning;
                state.send(state.life(worker), Statement::Begin { run, epoch });
            }
            Action::Clear { worker, run } => self.clear(state, worker, run),
            Action::Launch { worker, run } => {
                if let Local::Cleared { epoch } = state.workers[worker].runs[run] {
                    state.seen.starts[run] += 1;
                    state.workers[worker].runs[run] = Local::Living { epoch };
                }
            }
            Action::End { worker, run } => {
                if let Local::Living { epoch } = state.workers[worker].runs[run] {
                    state.workers[worker].runs[run] = Local::Done { epoch };
                }
            }
            Action::SendCommit { worker, run, epoch } => {
                state.send(state.life(worker), Statement::Commit { run, epoch })
            }
            Action::SendHandBack { worker, run, turn } => {
                state.send(state.life(worker), Statement::HandBack { run, turn })
            }
            _ => {}
        }
    }
}

/// A tick after it last did.
fn must_renew(state: &State, worker: usize) -> bool {
    let now = &state.workers[worker];
    let waits = || state.awaits(worker, |statement| matches!(statement, Statement::Renew { .. }));
    now.acts()
        && state.believes(worker)
        && !now.is_cut_off
        && state.clock(worker) + TTL > now.valid_until + MARGIN
        && !waits()
}

fn tick(state: &mut State) {
    state.now += 1;
    for worker in state.workers.iter_mut().filter(|worker| worker.pause == Pause::Frozen) {
        worker.lag += 1;
    }
}

fn committed(statement: Statement) -> Option<usize> {
    if let Statement::Commit { run, .. } = statement { Some(run) } else { None }
}

fn handed_back(statement: Statement) -> Option<usize> {
    if let Statement::HandBack { run, .. } = statement { Some(run) } else { None }
}
