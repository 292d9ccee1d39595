//! Tools: which commands belong to one, and the policy that they declare.
//!
//! A pattern is matched word by word in linear time, so that no pattern of a tenant is expensive.

use codelia_types::{Mode, ToolId};
use serde::{Deserialize, Serialize};

use crate::{
    Ceilings, DeclarationError, IsolationLevel, Plan, Policy,
    declaration_error::fail,
    format::{self, Format, ParseError},
};

const MAX_OWNER: usize = 255;
const MAX_EXECUTABLES: usize = 64;
const MAX_EXECUTABLE: usize = 4096;
const MAX_PATTERN: usize = 1000;
/// Stars in one word: each costs one search of the argument.
const MAX_STARS: usize = 8;
/// As the last word of a pattern: any further arguments.
const ANY_MORE: &str = "**";

/// The declaration of a tool about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToolDeclaration {
    /// Who answers for it.
    pub owner: String,
    /// Programs, by name or absolute path. A command that starts with one belongs to the tool.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub executables: Vec<String>,
    /// Words for program and arguments, separated by spaces. `*` stands for any text within one of
    /// them, `**` as the last word for any further arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command_pattern: Option<String>,
    /// Tightens the policy of the session. Its isolation level is that of the tool; without one,
    /// `LEVEL_2`.
    pub policy: Policy,
    /// Whether its runs change files only if they succeed, whatever their caller says.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub transactional: bool,
}

/// A tool as a file describes it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolDocument {
    /// The id of the tool in its tenant.
    pub name: ToolId,
    /// See [`ToolDeclaration::owner`].
    pub owner: String,
    /// See [`ToolDeclaration::executables`].
    #[serde(default)]
    pub executables: Vec<String>,
    /// See [`ToolDeclaration::command_pattern`].
    #[serde(default)]
    pub command_pattern: Option<String>,
    /// See [`ToolDeclaration::policy`].
    #[serde(default)]
    pub policy: Policy,
    /// See [`ToolDeclaration::transactional`].
    #[serde(default)]
    pub transactional: bool,
}

impl ToolDocument {
    /// Parses a document. Its declaration may still be invalid.
    ///
    /// # Errors
    /// Names the field that is unknown or has a wrong type.
    pub fn parse(text: &str, format: Format) -> Result<Self, ParseError> {
        format::parse(text, format)
    }

    /// The declaration, without the name.
    #[must_use]
    pub fn into_declaration(self) -> ToolDeclaration {
        let Self { name: _, owner, executables, command_pattern, policy, transactional } = self;
        ToolDeclaration { owner, executables, command_pattern, policy, transactional }
    }
}

impl ToolDeclaration {
    /// The isolation that its commands need at least.
    #[must_use]
    pub fn level(&self) -> IsolationLevel {
        self.policy.isolation_level.unwrap_or(IsolationLevel::Full)
    }

    /// Checks everything that does not depend on other policies.
    ///
    /// # Errors
    /// Names the first field that is not valid.
    pub fn validate(&self, ceilings: &Ceilings) -> Result<(), DeclarationError> {
        if self.owner.trim().is_empty() || self.owner.len() > MAX_OWNER || self.owner.contains('\0')
        {
            return fail("owner", format!("must have 1 to {MAX_OWNER} bytes and no null byte"));
        }
        if self.executables.is_empty() && self.command_pattern.is_none() {
            return fail("executables", "name a program, or set command_pattern");
        }
        self.check_executables()?;
        self.command_pattern.as_deref().map_or(Ok(()), check_pattern)?;
        self.check_transactional()?;
        Ok(self.policy.validate(ceilings)?)
    }

    /// Refuses what no run of a transactional tool could have.
    fn check_transactional(&self) -> Result<(), DeclarationError> {
        let mode = if self.level() == IsolationLevel::None { Mode::Logical } else { Mode::Bwrap };
        match Plan::check_transaction(mode, &self.policy) {
            Err(error) if self.transactional => {
                fail("transactional", error.remedy.unwrap_or("needs a mode with isolation"))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn check_executables(&self) -> Result<(), DeclarationError> {
        if self.executables.len() > MAX_EXECUTABLES {
            return fail(
                "executables",
                format!("has {}, maximum is {MAX_EXECUTABLES}", self.executables.len()),
            );
        }
        let is_valid = |program: &String| {
            let has_form =
                !program.contains('/') || program.starts_with('/') && !program.contains("/..");
            has_form && (1..=MAX_EXECUTABLE).contains(&program.len()) && !program.contains('\0')
        };
        match self.executables.iter().position(|program| !is_valid(program)) {
            None => Ok(()),
            Some(at) => fail(
                format!("executables[{at}]"),
                format!(
                    "must be a name without `/`, or an absolute path without `..`, of 1 to {MAX_EXECUTABLE} bytes"
                ),
            ),
        }
    }

    /// Whether a command belongs to the tool.
    #[must_use]
    pub fn matches(&self, argv: &[String]) -> bool {
        let Some(program) = argv.first() else { return false };
        self.executables.contains(program)
            || self.command_pattern.as_deref().is_some_and(|pattern| matches(pattern, argv))
    }
}

fn check_pattern(pattern: &str) -> Result<(), DeclarationError> {
    const FIELD: &str = "command_pattern";
    if pattern.len() > MAX_PATTERN || pattern.contains('\0') {
        return fail(FIELD, format!("must have at most {MAX_PATTERN} bytes and no null byte"));
    }
    let words: Vec<_> = pattern.split(' ').collect();
    let (last, others) = words.split_last().unwrap_or((&"", &[]));
    if words.iter().any(|word| word.is_empty()) {
        return fail(FIELD, "separate words by single spaces");
    }
    if words[0].contains('*') {
        return fail(FIELD, "must begin with a program without `*`");
    }
    if others.iter().any(|word| word.contains(ANY_MORE))
        || *last != ANY_MORE && last.contains(ANY_MORE)
    {
        return fail(FIELD, "`**` must be the last word");
    }
    if words.iter().any(|word| word.matches('*').count() > MAX_STARS) {
        return fail(FIELD, format!("a word must have at most {MAX_STARS} `*`"));
    }
    Ok(())
}

fn matches(pattern: &str, argv: &[String]) -> bool {
    let mut arguments = argv.iter();
    for word in pattern.split(' ') {
        if word == ANY_MORE {
            return true;
        }
        if !arguments.next().is_some_and(|argument| matches_word(word, argument)) {
            return false;
        }
    }
    arguments.next().is_none()
}

/// The text before the first star is at the start, that after the last at the end. What is between
/// is found from left to right: the leftmost occurrence leaves the most for the rest.
fn matches_word(word: &str, argument: &str) -> bool {
    let mut parts = word.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = argument.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    fn tool(executables: &[&str], pattern: Option<&str>) -> ToolDeclaration {
        ToolDeclaration {
            owner: "build".into(),
            executables: executables.iter().map(|&name| name.to_owned()).collect(),
            command_pattern: pattern.map(str::to_owned),
            ..ToolDeclaration::default()
        }
    }

    fn argv(command: &[&str]) -> Vec<String> {
        command.iter().map(|&word| word.to_owned()).collect()
    }

    fn field(tool: &ToolDeclaration) -> String {
        let ceilings = Ceilings(Limits::default());
        tool.validate(&ceilings).map_or_else(|error| error.field, |()| String::new())
    }

    #[test]
    fn command_belongs_by_program_or_pattern() {
        let black = tool(&["black", "/usr/bin/black"], None);
        assert!(
            black.matches(&argv(&["black", "-q"])) && black.matches(&argv(&["/usr/bin/black"]))
        );
        assert!(!black.matches(&argv(&["./black"])) && !black.matches(&argv(&["sh", "black"])));
        let log = tool(&[], Some("git log --*=*.rs **"));
        assert!(log.matches(&argv(&["git", "log", "--path=a.rs"])));
        assert!(log.matches(&argv(&["git", "log", "--path=a.rs", "x", "y"])));
        for other in
            [&["git"][..], &["git", "log"], &["git log", "--p=a.rs"], &["git", "log", "--p=a.py"]]
        {
            assert!(!log.matches(&argv(other)), "{other:?}");
        }
        assert!(!tool(&[], Some("git log")).matches(&argv(&["git", "log", "-p"])));
        assert!(!log.matches(&[]));
    }

    #[test]
    fn star_matches_any_text_within_an_argument() {
        for (word, argument, expected) in [
            ("a*", "a", true),
            ("a*", "ab c", true),
            ("*a", "ba", true),
            ("a*a", "a", false),
            ("a*b*c", "a1b2b3c", true),
            ("a*b*c", "a1c2b", false),
            ("*", "", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches_word(word, argument), expected, "{word} {argument}");
        }
    }

    #[test]
    fn hostile_pattern_is_matched_in_linear_time() {
        let word = "*a*a*a*a*a*a*a*b";
        let argument = "a".repeat(1024 * 1024);
        assert!(!matches_word(word, &argument));
    }

    #[test]
    fn invalid_declaration_is_refused_by_field() {
        assert_eq!(field(&tool(&["black"], None)), "");
        assert_eq!(field(&tool(&[], Some("git * **"))), "");
        assert_eq!(field(&ToolDeclaration { owner: " ".into(), ..tool(&["a"], None) }), "owner");
        assert_eq!(field(&tool(&[], None)), "executables");
        assert_eq!(field(&tool(&["a", "b/c"], None)), "executables[1]");
        assert_eq!(field(&tool(&["/a/../b"], None)), "executables[0]");
        for pattern in
            ["", "a  b", "* a", "a ** b", "a x**", "a **x", "a ********* b", &"a".repeat(1001)]
        {
            assert_eq!(field(&tool(&[], Some(pattern))), "command_pattern", "{pattern}");
        }
        let transactional = |policy: Policy| {
            field(&ToolDeclaration { transactional: true, policy, ..tool(&["a"], None) })
        };
        assert_eq!(transactional(Policy::default()), "");
        let none = Some(IsolationLevel::None);
        assert_eq!(
            transactional(Policy { isolation_level: none, ..Policy::default() }),
            "transactional"
        );
        let mut shared = Policy::default();
        shared.filesystem.read_write_paths = Some(vec!["/srv/shared".into()]);
        assert_eq!(transactional(shared), "transactional");
        let mut bad = tool(&["a"], None);
        bad.policy.syscalls.violation_limit = Some(0);
        assert_eq!(field(&bad), "policy.syscalls.violation_limit");
    }

    #[test]
    fn document_names_the_bad_field() {
        let text =
            "name: fmt\nowner: build\nexecutables: [black]\npolicy: {isolation_level: LEVEL_1}\n";
        let document = ToolDocument::parse(text, Format::Yaml).unwrap();
        assert_eq!(document.into_declaration().level(), IsolationLevel::Process);
        let error = ToolDocument::parse("name: fmt\nowner: a\npolicy: {netwerk: {}}", Format::Yaml)
            .unwrap_err();
        assert!(error.to_string().starts_with("policy.netwerk"), "{error}");
        assert_eq!(tool(&["a"], None).level(), IsolationLevel::Full, "nothing declared");
    }
}
