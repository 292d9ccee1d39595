//! Calls that are allowed whatever their arguments, as ranges of numbers at the beginning of a
//! filter. The kernel checks and compiles the filter for every sandbox, so a shorter one saves
//! time.

use std::collections::BTreeSet;

use super::program::{
    ALLOW, ARCHITECTURE_OFFSET, JUMP_EQUAL, LOAD, RETURN, branch, instruction, parts,
};

const NUMBER_OFFSET: u32 = 0;
/// `BPF_JMP` if greater or equal.
const JUMP_GREATER_EQUAL: u16 = 0x35;

/// The instructions before the comparisons.
const HEADER: usize = 3;
/// A jump skips 255 instructions at most.
const MAX_COMPARISONS: usize = 240;

/// Numbers of calls, as a list of the numbers at which it changes whether a call is allowed. The
/// first change allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ranges {
    changes: Vec<u32>,
}

/// Compares the number of a call.
#[derive(Debug, Clone, Copy)]
struct Comparison {
    number: u32,
    /// For this number and above.
    from: Target,
    below: Target,
}

/// Where a comparison leads to.
#[derive(Debug, Clone, Copy)]
enum Target {
    Allow,
    /// The program after the ranges.
    Rest,
    Comparison(usize),
}

impl Ranges {
    /// `None` if there are too many ranges for a filter.
    pub(super) fn new(numbers: &BTreeSet<u32>) -> Option<Self> {
        let mut changes = Vec::new();
        for &number in numbers {
            if changes.last() == Some(&number) {
                changes.pop();
            } else {
                changes.push(number);
            }
            changes.push(number + 1);
        }
        (changes.len() <= MAX_COMPARISONS).then_some(Self { changes })
    }

    /// A program that allows the calls in the ranges, and for all others returns what `rest`
    /// returns. Calls of another architecture than that of `rest` reach `rest`, too. `None` if that
    /// is unknown.
    pub(super) fn before(&self, rest: &[u64]) -> Option<Vec<u64>> {
        if self.changes.is_empty() {
            return Some(rest.to_vec());
        }
        let architecture = checked_architecture(rest)?;
        let mut comparisons = Vec::with_capacity(self.changes.len());
        search(&self.changes, false, &mut comparisons);
        let allow = HEADER + comparisons.len();
        let skip = |from: usize, target: Target| {
            let to = match target {
                Target::Allow => allow,
                Target::Rest => allow + 1,
                Target::Comparison(index) => HEADER + index,
            };
            u8::try_from(to - from - 1).ok()
        };
        let mut program = vec![
            instruction(LOAD, ARCHITECTURE_OFFSET),
            branch(JUMP_EQUAL, architecture, 0, skip(1, Target::Rest)?),
            instruction(LOAD, NUMBER_OFFSET),
        ];
        for Comparison { number, from, below } in comparisons {
            let at = program.len();
            program.push(branch(JUMP_GREATER_EQUAL, number, skip(at, from)?, skip(at, below)?));
        }
        program.push(instruction(RETURN, ALLOW));
        program.extend(rest);
        Some(program)
    }
}

/// Adds a binary search of the changes. `is_allowed` says what is below the first one.
fn search(changes: &[u32], is_allowed: bool, comparisons: &mut Vec<Comparison>) -> Target {
    let middle = changes.len() / 2;
    let Some(&number) = changes.get(middle) else {
        return if is_allowed { Target::Allow } else { Target::Rest };
    };
    let index = comparisons.len();
    comparisons.push(Comparison { number, from: Target::Rest, below: Target::Rest });
    let below = search(&changes[..middle], is_allowed, comparisons);
    let from = search(&changes[middle + 1..], is_allowed ^ middle.is_multiple_of(2), comparisons);
    comparisons[index] = Comparison { number, from, below };
    Target::Comparison(index)
}

/// The architecture that a program checks first, as those of libseccomp do.
pub(super) fn checked_architecture(program: &[u64]) -> Option<u32> {
    let [load, check, ..] = program else { return None };
    let is_load = *load == instruction(LOAD, ARCHITECTURE_OFFSET);
    let (code, constant) = parts(*check);
    (is_load && code == JUMP_EQUAL).then_some(constant)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: u32 = 0x0005_0001;
    const ARCHITECTURE: u32 = 0xc000_003e;

    /// The result of a program for a call, if it has only loads of the number and the architecture,
    /// and jumps.
    fn run(program: &[u64], architecture: u32, number: u32) -> u32 {
        let (mut at, mut value) = (0, 0);
        loop {
            let bytes = program[at].to_ne_bytes();
            let (code, constant) = parts(program[at]);
            let jump = |condition: bool| usize::from(if condition { bytes[2] } else { bytes[3] });
            at += 1;
            match code {
                LOAD if constant == NUMBER_OFFSET => value = number,
                LOAD => value = architecture,
                JUMP_EQUAL => at += jump(value == constant),
                JUMP_GREATER_EQUAL => at += jump(value >= constant),
                RETURN => return constant,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    fn rest() -> Vec<u64> {
        let load = instruction(LOAD, ARCHITECTURE_OFFSET);
        vec![load, branch(JUMP_EQUAL, ARCHITECTURE, 0, 0), instruction(RETURN, OTHER)]
    }

    #[test]
    fn exactly_the_numbers_are_allowed() {
        let sets: [&[u32]; 5] =
            [&[], &[0], &[7], &[0, 1, 2, 5, 6, 9, 300, 301], &[1, 3, 5, 7, 9, 11, 13, 15, 17]];
        for numbers in sets.map(|numbers| numbers.iter().copied().collect::<BTreeSet<u32>>()) {
            let program = Ranges::new(&numbers).unwrap().before(&rest()).unwrap();
            for number in (0..400).chain([u32::MAX, 0x4000_0000]) {
                let expected = if numbers.contains(&number) { ALLOW } else { OTHER };
                assert_eq!(
                    run(&program, ARCHITECTURE, number),
                    expected,
                    "{number} of {numbers:?}"
                );
                assert_eq!(run(&program, ARCHITECTURE + 1, number), OTHER, "another architecture");
            }
        }
    }

    #[test]
    fn what_jumps_cannot_reach_is_left_to_the_program() {
        let every_second = |count: u32| (0..count).map(|number| 2 * number).collect();
        assert!(Ranges::new(&every_second(120)).unwrap().before(&rest()).is_some());
        assert_eq!(Ranges::new(&every_second(121)), None);
        let numbers = Ranges::new(&[1].into()).unwrap();
        assert_eq!(numbers.before(&rest()[1..]), None, "it checks no architecture first");
    }
}
