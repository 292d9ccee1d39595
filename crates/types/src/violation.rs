//! What a command tried against its policy.

use serde::{Deserialize, Serialize};

/// A rule that a command tried to break, as it was seen and stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Stable upper-case word, such as `SYSCALL_BLOCKED`.
    pub kind: String,
    /// The name of the system call.
    pub syscall: String,
    /// Its number.
    pub nr: i32,
    /// Its arguments, as the kernel passed them.
    pub args: [u64; 6],
}

/// The same violation, and how often it was tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountedViolation {
    /// What was tried.
    #[serde(flatten)]
    pub violation: Violation,
    /// How often.
    pub count: u64,
}

/// What one run tried: each thing once, in the order it was first tried, and how much there was in all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violations {
    /// At most [`Violations::MAX_DISTINCT`].
    pub seen: Vec<CountedViolation>,
    /// All of them, also those that are not in `seen`.
    pub total: u64,
}

impl Violations {
    /// How many different ones are kept: a command must not be able to fill a store.
    pub const MAX_DISTINCT: usize = 100;

    /// Adds one; `true` if it is the first of its kind and was kept.
    pub fn add(&mut self, violation: Violation) -> bool {
        self.total = self.total.saturating_add(1);
        if let Some(known) = self.seen.iter_mut().find(|known| known.violation == violation) {
            known.count = known.count.saturating_add(1);
            return false;
        }
        let is_kept = self.seen.len() < Self::MAX_DISTINCT;
        if is_kept {
            self.seen.push(CountedViolation { violation, count: 1 });
        }
        is_kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(family: u64) -> Violation {
        let args = [family, 0, 0, 0, 0, 0];
        Violation { kind: "SYSCALL_BLOCKED".into(), syscall: "socket".into(), nr: 41, args }
    }

    #[test]
    fn the_same_attempt_is_kept_once_and_counted() {
        let mut all = Violations::default();
        assert!(all.add(socket(38)));
        assert!(!all.add(socket(38)));
        assert!(all.add(socket(40)));
        let counts: Vec<u64> = all.seen.iter().map(|one| one.count).collect();
        assert_eq!((counts.as_slice(), all.total), ([2, 1].as_slice(), 3));
    }

    #[test]
    fn a_flood_is_counted_but_not_kept() {
        let mut all = Violations::default();
        for family in 0..1000 {
            all.add(socket(family));
        }
        assert_eq!((all.seen.len(), all.total), (Violations::MAX_DISTINCT, 1000));
    }
}
