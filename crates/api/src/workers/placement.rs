//! Which of the candidate workers a session is offered to first.

use std::cmp::Ordering;

use codelia_store::WorkerCandidate;
use serde::{Deserialize, Serialize};

/// A worker with a lower number is preferred until this share of its slots is busy.
const MAX_PREFERRED_LOAD: f64 = 0.5;

/// Which of two random workers gets a new session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The less loaded one.
    #[default]
    Spread,
    /// The one whose id ends in the lower number, while less than half of its slots are busy. Then
    /// the workers that a StatefulSet removes first have the fewest sessions.
    LowestNumber,
}

impl Placement {
    /// Sorts candidates, the preferred one first.
    pub(crate) fn sort(self, candidates: &mut [WorkerCandidate]) {
        match self {
            Self::Spread => candidates.sort_by(by_load),
            Self::LowestNumber => candidates.sort_by(by_number),
        }
    }
}

fn by_load(a: &WorkerCandidate, b: &WorkerCandidate) -> Ordering {
    load(a).total_cmp(&load(b))
}

fn by_number(a: &WorkerCandidate, b: &WorkerCandidate) -> Ordering {
    let is_full = |candidate| load(candidate) >= MAX_PREFERRED_LOAD;
    let preferred = is_full(a).cmp(&is_full(b));
    let number = if is_full(a) { Ordering::Equal } else { number(a).cmp(&number(b)) };
    preferred.then(number).then_with(|| by_load(a, b))
}

fn load(candidate: &WorkerCandidate) -> f64 {
    f64::from(candidate.busy_slots) / f64::from(candidate.slots.max(1))
}

/// The number that an id such as `codelia-worker-12` ends in.
fn number(candidate: &WorkerCandidate) -> u64 {
    let id = candidate.id.as_str();
    let start = id.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    id[start..].parse().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use codelia_types::Incarnation;

    use super::*;

    fn candidate(id: &str, slots: i32, busy_slots: i32) -> WorkerCandidate {
        WorkerCandidate {
            id: id.parse().unwrap(),
            incarnation: Incarnation::generate(),
            address: String::new(),
            slots,
            busy_slots,
        }
    }

    /// The preferred one of two workers with 8 slots, in whatever order they are found.
    fn preferred(placement: Placement, a: (&str, i32), b: (&str, i32)) -> String {
        let sorted = |pair: [(&str, i32); 2]| {
            let mut candidates = pair.map(|(id, busy)| candidate(id, 8, busy));
            placement.sort(&mut candidates);
            candidates[0].id.to_string()
        };
        let first = sorted([a, b]);
        assert_eq!(first, sorted([b, a]));
        first
    }

    #[test]
    fn least_loaded_worker_comes_first() {
        let mut candidates = [candidate("full", 2, 2), candidate("half", 8, 4)];
        Placement::Spread.sort(&mut candidates);
        assert_eq!(candidates[0].id.as_str(), "half");
        assert_eq!(preferred(Placement::Spread, ("w-0", 1), ("w-1", 0)), "w-1");
    }

    #[test]
    fn lower_number_comes_first_until_half_full() {
        let preferred = |a, b| preferred(Placement::LowestNumber, a, b);
        assert_eq!(preferred(("w-2", 3), ("w-10", 0)), "w-2", "numbers, not text");
        assert_eq!(preferred(("w-2", 4), ("w-10", 3)), "w-10");
        assert_eq!(preferred(("w-2", 5), ("w-10", 4)), "w-10", "both are half full: by load");
        assert_eq!(preferred(("w-2", 4), ("w-10", 5)), "w-2");
        assert_eq!(preferred(("other", 0), ("w-10", 3)), "w-10", "a number before none");
        assert_eq!(preferred(("one", 1), ("other", 0)), "other", "without numbers: by load");
    }
}
