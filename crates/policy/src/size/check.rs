//! Checks the size of a policy.

use super::{
    maximum::{
        ENTRIES, LAYOUT_PATHS, MAX_HOST_GLOBS, PATHS, PATTERNS, TooLarge, VOLUMES, at_most,
        check_bytes,
    },
    value::Value,
};
use crate::{FIELDS, NetworkPolicy, Policy, hosts};

/// A policy with more entries is checked and carried out off the async runtime.
const LARGE_ENTRIES: usize = 32;

/// Adds the entries of a list to those of other lists, which count together.
fn add(total: &mut usize, entries: usize) -> usize {
    *total += entries;
    *total
}

impl Policy {
    /// Checks the size of every list and text. Takes time linear in the size of the policy.
    ///
    /// # Errors
    /// Names the first field that is too large.
    pub fn check_size(&self) -> Result<(), TooLarge> {
        let mut paths = 0;
        let mut patterns = 0;
        for field in FIELDS {
            let value = field.value(self);
            let entries = value.entries();
            let (total, maximum) = match field.path.split_once('.') {
                Some(("filesystem", "volumes")) => (entries, &VOLUMES),
                Some(("filesystem", _)) => (add(&mut paths, entries), &PATHS),
                Some(("layout", _)) => (entries, &LAYOUT_PATHS),
                Some(("command", _)) => (add(&mut patterns, entries), &PATTERNS),
                _ => (entries, &ENTRIES),
            };
            maximum.check(field.path, total)?;
            value.check_entries(field.path)?;
        }
        self.network.check_size()?;
        ENTRIES.check("delegate", self.delegate.len())?;
        self.delegate.check_entries("delegate")?;
        let bytes: usize = FIELDS.iter().map(|field| field.value(self).bytes()).sum();
        check_bytes(bytes + self.delegate.bytes())
    }

    /// Whether the cost of this policy is too high for the async runtime: it has many entries, or
    /// patterns, which must be compiled.
    #[must_use]
    pub fn is_large(&self) -> bool {
        let entries: usize = FIELDS.iter().map(|field| field.value(self).entries()).sum();
        let patterns = self.command.lists().iter().any(|(_, list)| !list.is_empty());
        patterns || entries > LARGE_ENTRIES
    }
}

impl NetworkPolicy {
    /// The host lists with their fields.
    pub(crate) fn host_lists(&self) -> [(&'static str, &[String]); 3] {
        [
            ("network.allowed_hosts", self.allowed_hosts.as_deref().unwrap_or_default()),
            ("network.ask_hosts", self.ask_hosts.as_deref().unwrap_or_default()),
            ("network.blocked_hosts", &self.blocked_hosts),
        ]
    }

    /// Checks the number of patterns in the host lists. Merging can make more of them than either
    /// policy has.
    ///
    /// # Errors
    /// Names the first list that is too large.
    pub fn check_size(&self) -> Result<(), TooLarge> {
        self.host_lists().into_iter().try_for_each(|(field, list)| {
            let globs = list.iter().filter(|pattern| hosts::is_glob(pattern)).count();
            let remedy = "use `*.` and a name instead";
            at_most(field, globs, MAX_HOST_GLOBS, "patterns with a `*` inside a label", remedy)?;
            ENTRIES.check(field, list.len())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::{
        Ceilings,
        size::{MAX_PATH_BYTES, MAX_PATH_COMPONENTS, MAX_PATHS, MAX_PATTERNS},
    };

    fn field(policy: &Policy) -> Option<String> {
        let found = policy.validate(&Ceilings::default()).err().map(|error| error.field);
        assert_eq!(policy.check_size().err().map(|error| error.field), found);
        found
    }

    fn denying(paths: impl IntoIterator<Item = String>) -> Policy {
        let mut policy = Policy::default();
        policy.filesystem.denied_paths = paths.into_iter().map(PathBuf::from).collect();
        policy
    }

    #[test]
    fn oversized_policy_is_refused_by_field() {
        let path = |number: usize| format!("/opt/{number}");
        let mut policy = denying((0..MAX_PATHS).map(path));
        assert_eq!(field(&policy), None);
        policy.filesystem.read_only_paths = Some(vec!["/srv".into()]);
        assert_eq!(field(&policy).as_deref(), Some("filesystem.denied_paths"), "all lists count");
        assert_eq!(field(&denying(["/a".repeat(MAX_PATH_COMPONENTS)])), None);
        let deep = "/a".repeat(MAX_PATH_COMPONENTS + 1);
        assert_eq!(field(&denying([deep])).as_deref(), Some("filesystem.denied_paths[0]"));
        let long = format!("/{}", "a".repeat(MAX_PATH_BYTES));
        assert_eq!(field(&denying([long])).as_deref(), Some("filesystem.denied_paths[0]"));
        let large = (0..100).map(|number| format!("/{number}{}", "a".repeat(4000)));
        assert_eq!(field(&denying(large)).as_deref(), Some(""), "the whole document is too long");
        let mut policy = Policy::default();
        policy.command.allowed_patterns = Some(vec!["a".to_owned()]);
        policy.command.blocked_patterns = vec!["a".to_owned(); MAX_PATTERNS];
        assert_eq!(field(&policy).as_deref(), Some("command.blocked_patterns"), "both lists count");
    }

    #[test]
    fn host_globs_are_few() {
        let globs =
            |count| Some((0..count).map(|n| format!("a{n}x*.example.com")).collect::<Vec<_>>());
        let mut policy = Policy::default();
        policy.network.allowed_hosts = globs(MAX_HOST_GLOBS);
        assert_eq!(field(&policy), None);
        policy.network.ask_hosts = globs(MAX_HOST_GLOBS + 1);
        assert_eq!(field(&policy).as_deref(), Some("network.ask_hosts"));
        let (mut upper, mut lower) = (Policy::default(), Policy::default());
        let ends = |count| (0..count).map(|n| format!("*x{n}.example.com")).collect::<Vec<_>>();
        (upper.network.allowed_hosts, lower.network.allowed_hosts) = (globs(40), Some(ends(40)));
        let merged = upper.merge(&lower).network.check_size().unwrap_err();
        assert_eq!(merged.field, "network.allowed_hosts", "merging makes more");
    }

    #[test]
    fn error_names_limit_and_remedy() {
        let error = denying((0..=MAX_PATHS).map(|n| format!("/opt/{n}"))).check_size().unwrap_err();
        assert_eq!(
            error.to_string(),
            "has 501 paths in the lists of filesystem, maximum is 500; name directories instead of the files in them"
        );
    }
}
