//! Changes inputs in the ways that break parsers: lengths, digits, missing and repeated parts.

/// Longer inputs cost time and find little more.
const MAX_BYTES: usize = 64 * 1024;
const MAX_CHANGES: usize = 4;
/// Bytes that many formats give a meaning, and the ends of ranges.
const SPECIAL: &[u8] = b"\x00\x01\x7f\x80\xff\r\n\t \"'\\/:;,.=%&*#-+_{}[]09aAzZ";

/// A sequence of mutations, the same for each program that makes one.
#[derive(Debug, Default)]
pub(crate) struct Mutator {
    state: u64,
}

impl Mutator {
    /// The next mutation of one of the seeds.
    pub(crate) fn mutate(&mut self, seeds: &[&[u8]]) -> Vec<u8> {
        let mut bytes = self.pick(seeds).to_vec();
        for _ in 0..=self.below(MAX_CHANGES) {
            self.change(&mut bytes, seeds);
        }
        bytes.truncate(MAX_BYTES);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[&[u8]]) {
        let (start, end) = self.range(bytes.len());
        match self.below(10) {
            0 => self.at(bytes, |random, byte| *byte ^= 1 << random.below(8)),
            1 => self.at(bytes, |random, byte| *byte = *random.pick(SPECIAL)),
            2 => self.at(bytes, |random, byte| *byte = random.byte()),
            3 => {
                let less = self.below(2) == 0;
                self.at(bytes, |_, byte| {
                    *byte = if less { byte.wrapping_sub(1) } else { byte.wrapping_add(1) }
                });
            }
            4 => bytes.truncate(start),
            5 => drop(bytes.drain(start..end)),
            6 => {
                let repeated = bytes[start..end].repeat(1 + self.below(8));
                bytes.splice(start..start, repeated);
            }
            7 => {
                let other = self.pick(seeds);
                let (from, to) = self.range(other.len());
                bytes.splice(start..end, other[from..to].iter().copied());
            }
            8 => {
                let special = [*self.pick(SPECIAL)].repeat(1 + self.below(4));
                bytes.splice(start..start, special);
            }
            _ => {
                let random: Vec<u8> = (0..=self.below(8)).map(|_| self.byte()).collect();
                bytes.splice(start..start, random);
            }
        }
    }

    /// Changes one byte, if there is one.
    fn at(&mut self, bytes: &mut [u8], change: impl Fn(&mut Self, &mut u8)) {
        let at = self.below(bytes.len());
        if let Some(byte) = bytes.get_mut(at) {
            change(self, byte);
        }
    }

    /// A range of something with this length. Most are short.
    fn range(&mut self, length: usize) -> (usize, usize) {
        let start = self.below(length + 1);
        let max = if self.below(4) == 0 { length } else { 16 };
        (start, start + self.below((length - start).min(max) + 1))
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }

    /// A number below a bound, 0 if the bound is.
    fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX);
        let below = self.next().checked_rem(bound).unwrap_or_default();
        usize::try_from(below).unwrap_or_default()
    }

    /// The next number of SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
