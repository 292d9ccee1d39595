//! Violations of a policy.

use serde::{Deserialize, Serialize};

/// An attempt to violate the policy, which was blocked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Stable upper-case word, such as `SYSCALL_BLOCKED`.
    pub kind: String,
    /// The name of the system call.
    pub syscall: String,
    /// The number of the system call.
    pub nr: i32,
    /// The arguments of the system call.
    pub args: [u64; 6],
    /// The file that the call is about, if it was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

impl Violation {
    /// The kind of a call that the filter blocked.
    pub const SYSCALL_BLOCKED: &'static str = "SYSCALL_BLOCKED";
    /// The kind of an attempt to execute a program that the policy does not list.
    pub const EXEC_DENIED: &'static str = "EXEC_DENIED";

    /// The arguments in hexadecimal, as tools that trace system calls print them.
    #[must_use]
    pub fn display_args(&self) -> String {
        self.args.map(|arg| format!("{arg:#x}")).join(", ")
    }
}

/// A violation and the number of its occurrences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountedViolation {
    /// The violation.
    #[serde(flatten)]
    pub violation: Violation,
    /// The number of occurrences.
    pub count: u64,
}

/// The violations of one run: the distinct ones with their counts, in the order of their first
/// occurrence, and the total.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violations {
    /// Distinct violations, at most [`Violations::MAX_DISTINCT`].
    pub seen: Vec<CountedViolation>,
    /// The number of all violations, including those not in `seen`.
    pub total: u64,
}

impl Violations {
    /// Maximum number of distinct violations to keep, so that a command cannot fill the store.
    pub const MAX_DISTINCT: usize = 100;

    /// Whether there was none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Counts a violation. Returns `true` if it is new and was kept.
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
        Violation {
            kind: "SYSCALL_BLOCKED".into(),
            syscall: "socket".into(),
            nr: 41,
            args,
            path: None,
        }
    }

    #[test]
    fn repeated_violation_is_kept_once() {
        let mut all = Violations::default();
        assert!(all.add(socket(38)));
        assert!(!all.add(socket(38)));
        assert!(all.add(socket(40)));
        let counts: Vec<u64> = all.seen.iter().map(|one| one.count).collect();
        assert_eq!((counts.as_slice(), all.total), ([2, 1].as_slice(), 3));
    }

    #[test]
    fn flood_is_counted_but_not_kept() {
        let mut all = Violations::default();
        for family in 0..1000 {
            all.add(socket(family));
        }
        assert_eq!((all.seen.len(), all.total), (Violations::MAX_DISTINCT, 1000));
    }
}
