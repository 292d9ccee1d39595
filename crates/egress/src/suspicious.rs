//! Names below a wildcard that look as if they carry data to the name server of an allowed domain.
//! A name that a policy lists by itself is never suspicious.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;

use crate::refusal::Reason;

/// Labels of a name.
const MAX_LABELS: usize = 8;
/// Bytes of a name.
const MAX_NAME: usize = 128;
/// From this length on, the characters of a label are counted.
const LONG_LABEL: usize = 32;
/// Bits for each character of a long label. English words have about 4; encoded data has 5 and
/// more.
const MAX_ENTROPY: f64 = 4.4;
/// Different names below wildcards that one sandbox may use.
const MAX_NAMES: usize = 512;

/// The names below wildcards that one sandbox used.
#[derive(Debug, Default)]
pub(crate) struct WildcardNames(Mutex<HashSet<String>>);

impl WildcardNames {
    /// Checks a name that this pattern allowed.
    pub(crate) fn check(&self, name: &str, pattern: &str) -> Result<(), Reason> {
        if !pattern.contains(['*', '?', '[', '{']) {
            return Ok(());
        }
        if carries_data(name) {
            return Err(Reason::SuspiciousName);
        }
        let mut names = self.0.lock();
        if names.len() >= MAX_NAMES && !names.contains(name) {
            return Err(Reason::TooManyWildcardNames);
        }
        names.insert(name.to_owned());
        Ok(())
    }
}

fn carries_data(name: &str) -> bool {
    name.len() > MAX_NAME
        || name.split('.').count() > MAX_LABELS
        || name.split('.').any(|label| label.len() >= LONG_LABEL && entropy(label) > MAX_ENTROPY)
}

/// Bits for each character.
fn entropy(text: &str) -> f64 {
    let mut counts = HashMap::<u8, f64>::new();
    for byte in text.bytes() {
        *counts.entry(byte).or_default() += 1.0;
    }
    let length = f64::from(u32::try_from(text.len()).unwrap_or(u32::MAX));
    counts.values().map(|count| -(count / length) * (count / length).log2()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_data_is_refused_below_wildcards() {
        let names = WildcardNames::default();
        let ordinary = [
            "registry.npmjs.org",
            "objects-origin.githubusercontent.com",
            "prod-registry-k8s-io-us-west-1.s3.dualstack.us-west-1.amazonaws.com",
            "d5l0dvt14r5h8.cloudfront.net",
            "ip-10-0-0-1.eu-central-1.compute.amazonaws.com",
            // A digest in hexadecimal has at most 4 bits for each character.
            "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae.example.com",
        ];
        for name in ordinary {
            assert_eq!(names.check(name, "*.example.com"), Ok(()), "{name}");
        }
        let data = [
            "nbswy3dpfqqho33snrscc4tfmfsgs3thebrgk2lom4wca3tpmvzs6zlqmjwge.example.com".to_owned(),
            "a.b.c.d.e.f.g.example.com".to_owned(),
            format!("{}.{}.{}.example.com", "a".repeat(50), "b".repeat(50), "c".repeat(50)),
        ];
        for name in data {
            assert_eq!(names.check(&name, "*.example.com"), Err(Reason::SuspiciousName), "{name}");
            assert_eq!(names.check(&name, &name), Ok(()), "listed by itself");
        }
    }

    #[test]
    fn number_of_names_is_limited() {
        let names = WildcardNames::default();
        for number in 0..MAX_NAMES {
            assert_eq!(names.check(&format!("{number}.example.com"), "*.example.com"), Ok(()));
        }
        assert_eq!(
            names.check("new.example.com", "*.example.com"),
            Err(Reason::TooManyWildcardNames)
        );
        assert_eq!(names.check("0.example.com", "*.example.com"), Ok(()));
    }
}
