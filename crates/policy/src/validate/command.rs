//! Validation of command patterns, and the check of a command against them.

use regex::{RegexSet, RegexSetBuilder};

use super::error::{PolicyError, check_range, fail, fail_at};
use crate::{CommandPolicy, size::MAX_COMPILED_BYTES};

/// The maximum of `command.max_length`, in bytes.
const MAX_COMMAND: u64 = 1024 * 1024;

impl CommandPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        let allowed = self.allowed_patterns.as_deref();
        if allowed.is_some_and(<[_]>::is_empty) {
            return fail("command.allowed_patterns", "is empty; omit it to allow all commands");
        }
        check_range("command.max_length", self.max_length, &(1..=MAX_COMMAND))?;
        self.lists().into_iter().try_for_each(|(field, patterns)| check_patterns(field, patterns))
    }

    /// The lists of patterns with their fields.
    pub(crate) fn lists(&self) -> [(&'static str, &[String]); 2] {
        [
            ("command.allowed_patterns", self.allowed_patterns.as_deref().unwrap_or_default()),
            ("command.blocked_patterns", &self.blocked_patterns),
        ]
    }

    /// Checks a command, its program and arguments joined by spaces, before it starts.
    ///
    /// This helps the caller and is not a security boundary: only the sandbox restricts a command.
    ///
    /// # Errors
    /// Names the rule that the command breaks.
    pub fn check(&self, argv: &[String]) -> Result<(), PolicyError> {
        CommandRules::new(self)?.check(argv)
    }
}

/// A command policy with its patterns compiled, to check many commands.
#[derive(Debug)]
pub(crate) struct CommandRules {
    max_length: Option<u64>,
    // Most policies have no patterns; none are compiled for them.
    blocked: Option<RegexSet>,
    allowed: Option<RegexSet>,
}

impl CommandRules {
    pub(crate) fn new(policy: &CommandPolicy) -> Result<Self, PolicyError> {
        let blocked = Some(&policy.blocked_patterns).filter(|patterns| !patterns.is_empty());
        let allowed = policy.allowed_patterns.as_ref();
        Ok(Self {
            max_length: policy.max_length,
            blocked: blocked
                .map(|patterns| compile("command.blocked_patterns", patterns))
                .transpose()?,
            allowed: allowed
                .map(|patterns| compile("command.allowed_patterns", patterns))
                .transpose()?,
        })
    }

    pub(crate) fn check(&self, argv: &[String]) -> Result<(), PolicyError> {
        let command = argv.join(" ");
        match self.max_length {
            Some(max) if command.len() as u64 > max => fail(
                "command.max_length",
                format!("the command has {} bytes, maximum is {max}", command.len()),
            ),
            _ if self.blocked.as_ref().is_some_and(|set| set.is_match(&command)) => {
                fail("command.blocked_patterns", "the command matches a blocked pattern")
            }
            _ if self.allowed.as_ref().is_some_and(|set| !set.is_match(&command)) => {
                fail("command.allowed_patterns", "the command matches no allowed pattern")
            }
            _ => Ok(()),
        }
    }
}

fn check_patterns(field: &'static str, patterns: &[String]) -> Result<(), PolicyError> {
    let is_invalid = |pattern: &String| pattern.is_empty() || pattern.contains('\0');
    let invalid = patterns.iter().position(is_invalid);
    fail_at(field, invalid, "must not be empty or contain a null byte")?;
    // Compiling takes longer than all other checks, and most policies have no patterns.
    if patterns.is_empty() {
        return Ok(());
    }
    let Err(whole) = compile(field, patterns) else { return Ok(()) };
    // The first pattern that cannot be added to those before it. Few compilations find it, and each
    // stops at the size limit.
    let mut compiles = 0;
    let mut fails = patterns.len();
    while compiles + 1 < fails {
        let middle = compiles.midpoint(fails);
        match compile(field, &patterns[..middle]) {
            Ok(_) => compiles = middle,
            Err(_) => fails = middle,
        }
    }
    let error = compile(field, &patterns[..fails]).err().unwrap_or(whole);
    fail(format!("{field}[{compiles}]"), error.message)
}

fn compile(field: &str, patterns: &[String]) -> Result<RegexSet, PolicyError> {
    let set = RegexSetBuilder::new(patterns).size_limit(MAX_COMPILED_BYTES).build();
    set.or_else(|error| match error {
        regex::Error::CompiledTooBig(maximum) => fail(
            field,
            format!("the patterns need more than {maximum} bytes compiled; use fewer or simpler patterns"),
        ),
        error => fail(field, error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_refused_by_rule_it_breaks() {
        let rules = CommandPolicy {
            allowed_patterns: Some(vec!["^cargo (build|test)( |$)".into()]),
            blocked_patterns: vec!["--release".into()],
            max_length: Some(30),
        };
        let check = |command: &str| {
            let argv: Vec<_> = command.split(' ').map(str::to_owned).collect();
            rules.check(&argv).map_err(|error| error.field)
        };
        assert_eq!(check("cargo test"), Ok(()));
        assert_eq!(check("cargo run"), Err("command.allowed_patterns".into()));
        assert_eq!(check("cargo test --release"), Err("command.blocked_patterns".into()));
        assert_eq!(
            check(&format!("cargo test {}", "a".repeat(30))),
            Err("command.max_length".into())
        );
    }
}
