//! Properties of policy documents. The entry point of the fuzz target panics if one does not hold.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a panic is a finding")]

use crate::{Ceilings, Format, Policy, size::MAX_BYTES};

/// An error names a field and quotes what it found there, escaped. It may list what is expected.
const MAX_ERROR: usize = 8 * 1024;
const MAX_QUOTED: usize = 16;

/// A policy in YAML.
pub fn policy_yaml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let policy = match Policy::parse(text, Format::Yaml) {
        Ok(policy) => policy,
        Err(error) => {
            assert!(error.to_string().len() <= MAX_ERROR + MAX_QUOTED * text.len());
            return;
        }
    };
    assert!(text.len() <= MAX_BYTES);
    for format in [Format::Json, Format::Yaml, Format::Toml] {
        match policy.write(format) {
            Ok(text) => {
                assert_eq!(Policy::parse(&text, format).as_ref(), Ok(&policy), "{format}: {text}")
            }
            Err(error) => assert_eq!(format, Format::Toml, "{error}"),
        }
    }
    if policy.validate(&Ceilings::default()).is_ok() {
        let once = policy.merge(&Policy::default());
        assert_eq!(once.merge(&policy), once);
        assert_eq!(Policy::default().merge(&policy), once);
        assert_eq!(policy.check_within(&policy), Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_yaml_holds_for_mutations() {
        codelia_fuzz::check("policy_yaml", 3000, policy_yaml);
    }
}
