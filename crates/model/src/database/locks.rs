//! Row locks: which statements wait for each other.

use crate::{
    protocol::{Protocol, Variant},
    state::{Mask, State},
    statement::{Call, Effect, Statement},
};

/// The strength of a lock on a row of `sessions`, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SessionLock {
    /// `FOR KEY SHARE`: only `FOR UPDATE` waits for it.
    KeyShare,
    /// `FOR SHARE`.
    Share,
    /// `FOR UPDATE`, or an `UPDATE`.
    Update,
}

impl Protocol {
    /// Whether a call must wait for another one before it has this effect.
    pub(crate) fn conflicts(&self, state: &State, call: &Call, effect: &Effect) -> bool {
        state.calls.iter().any(|other| {
            let Some(locked) = other.locked() else { return false };
            let is_append = |call: &Call| matches!(call.statement, Statement::Append { .. });
            let has_key = |call: &Call| matches!(call.statement, Statement::Insert { .. });
            let same_key = self.bounds.same_key && !self.is(Variant::UnlockedKey);
            !self.ignores_locks(call)
                && !self.ignores_locks(other)
                && (effect.workers & locked.workers != 0
                    || (effect.sessions & locked.sessions != 0
                        && self.exclude_each_other(call, other))
                    || (effect.runs & locked.runs != 0 && !(is_append(call) && is_append(other)))
                    || (same_key && has_key(call) && has_key(other)))
        })
    }

    /// The sessions that statements in flight have locked, in any strength.
    pub(crate) fn locked_sessions(&self, state: &State) -> Mask {
        self.locked(state, |effect| effect.sessions)
    }

    /// The runs that statements in flight have locked.
    pub(crate) fn locked_runs(&self, state: &State) -> Mask {
        self.locked(state, |effect| effect.runs)
    }

    /// The rows of `workers` that statements in flight have locked.
    pub(crate) fn locked_workers(&self, state: &State) -> Mask {
        self.locked(state, |effect| effect.workers)
    }

    fn locked(&self, state: &State, rows: impl Fn(&Effect) -> Mask) -> Mask {
        let calls = state.calls.iter().filter(|call| !self.ignores_locks(call));
        calls.filter_map(Call::locked).fold(0, |locked, effect| locked | rows(effect))
    }

    fn exclude_each_other(&self, one: &Call, other: &Call) -> bool {
        let one = self.session_lock(one.statement);
        let other = self.session_lock(other.statement);
        one.max(other) == SessionLock::Update && one.min(other) != SessionLock::KeyShare
    }

    fn session_lock(&self, statement: Statement) -> SessionLock {
        match statement {
            Statement::Insert { .. } if self.is(Variant::WeakInsertLock) => SessionLock::KeyShare,
            Statement::Insert { .. } | Statement::HandBack { .. } => SessionLock::Share,
            _ => SessionLock::Update,
        }
    }

    /// Whether the variant leaves out the locks of this statement.
    fn ignores_locks(&self, call: &Call) -> bool {
        match call.statement {
            Statement::Insert { .. } => self.is(Variant::NoInsertLock),
            Statement::Append { .. } => self.is(Variant::UnlockedAppend),
            Statement::ExpireSessions => self.is(Variant::OneSnapshotExpiry),
            Statement::Sweep => self.is(Variant::UnlockedSweep),
            _ => false,
        }
    }
}
