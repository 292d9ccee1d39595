//! Runs the entry point of a fuzz target in a test: over its corpus, and over mutations of it.
//!
//! The inputs are the same in every run. `make fuzz` gives the same entry points to a fuzzer, which
//! finds more; what it finds goes into the corpus.

#![forbid(unsafe_code)]

mod mutation;

use std::{fs, panic::catch_unwind, path::Path};

use mutation::Mutator;

/// An input for which an entry point panics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The file of the corpus, or the number of the mutation.
    pub origin: String,
    /// The input.
    pub input: Vec<u8>,
}

/// Calls an entry point with each file of `fuzz/corpus/<target>` and with this many mutations. The
/// entry point panics if a property does not hold.
///
/// # Panics
/// If the entry point does, or if the corpus is empty.
pub fn check(target: &str, mutations: u32, entry: fn(&[u8])) {
    let corpus = corpus(target);
    assert!(!corpus.is_empty(), "fuzz/corpus/{target} is empty");
    if let Some(Failure { origin, input }) = find_failure(&corpus, mutations, entry) {
        let length = input.len();
        let text = input.escape_ascii();
        panic!("fuzz target {target} fails for {origin}, {length} bytes: b\"{text}\"");
    }
}

/// The first input for which an entry point panics.
#[must_use]
pub fn find_failure(
    corpus: &[(String, Vec<u8>)],
    mutations: u32,
    entry: fn(&[u8]),
) -> Option<Failure> {
    let fails = |input: &[u8]| catch_unwind(|| entry(input)).is_err();
    if let Some((origin, input)) = corpus.iter().find(|(_, input)| fails(input)) {
        return Some(Failure { origin: origin.clone(), input: input.clone() });
    }
    let mut mutator = Mutator::default();
    let seeds: Vec<&[u8]> = corpus.iter().map(|(_, input)| input.as_slice()).collect();
    (0..mutations).find_map(|number| {
        let input = mutator.mutate(&seeds);
        fails(&input).then(|| Failure { origin: format!("mutation {number}"), input })
    })
}

/// The names and contents of the files, in order of their names.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries =
        fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry?;
        Ok((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?))
    };
    let mut files =
        entries.map(read).collect::<std::io::Result<Vec<_>>>().unwrap_or_else(|error| {
            panic!("cannot read {}: {error}", directory.display());
        });
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUTATIONS: u32 = 20_000;

    /// A message of this double: its length, that many bytes, and their sum.
    const VALID: &[u8] = b"\x05hello\x14 and what follows";

    fn find(entry: fn(&[u8])) -> Option<Failure> {
        find_failure(&[("valid".to_owned(), VALID.to_vec())], MUTATIONS, entry)
    }

    /// Parses the message without a fault.
    fn parse(bytes: &[u8]) -> Option<&[u8]> {
        let (&length, rest) = bytes.split_first()?;
        let (body, rest) = rest.split_at_checked(length.into())?;
        let sum = body.iter().fold(0_u8, |sum, &byte| sum.wrapping_add(byte));
        (rest.first() == Some(&sum)).then_some(body)
    }

    #[test]
    fn parser_without_fault_passes() {
        assert!(parse(VALID).is_some());
        assert_eq!(
            find(|bytes| assert!(parse(bytes).is_none_or(|body| body.len() < bytes.len()))),
            None
        );
    }

    /// An entry point of a parser with a fault.
    type Entry = fn(&[u8]);

    #[test]
    fn planted_faults_are_found() {
        let faults: [(&str, Entry); 6] = [
            ("trusts the length", |bytes| {
                if let [length, rest @ ..] = bytes {
                    let _ = &rest[..usize::from(*length)];
                }
            }),
            ("does not expect an empty body", |bytes| assert_ne!(parse(bytes), Some(&[][..]))),
            ("adds to the length", |bytes| {
                let _ = bytes.first().map(|length| length.checked_add(0x80).unwrap());
            }),
            ("takes no byte above 0x7f", |bytes| assert!(bytes.is_ascii())),
            ("depends on what follows", |bytes| {
                assert!(parse(bytes).is_none() || bytes.len() >= 20)
            }),
            ("has a buffer for one message", |bytes| assert!(bytes.len() < 2 * VALID.len())),
        ];
        for (fault, entry) in faults {
            let failure = find(entry).unwrap_or_else(|| panic!("not found: {fault}"));
            assert!(catch_unwind(|| entry(&failure.input)).is_err(), "not the input: {fault}");
            assert_eq!(find(entry), Some(failure), "another input in the next run: {fault}");
        }
    }

    #[test]
    #[should_panic(expected = "fuzz/corpus/nosuch")]
    fn missing_corpus_fails() {
        check("nosuch", 1, |_| {});
    }
}
