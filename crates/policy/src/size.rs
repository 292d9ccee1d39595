//! The maximum size of a policy. It is checked before anything else looks at the policy, so that the
//! cost of any policy is bounded.

use std::{
    fmt,
    path::{Component, PathBuf},
};

use crate::{LayoutPolicy, NetworkPolicy, Policy, hosts};

/// Maximum length of a policy in bytes: of its text, of its message, and of all values together.
pub const MAX_BYTES: usize = 256 * 1024;
/// Maximum number of paths in the lists of `filesystem` together. Each costs a sandbox a mount.
pub const MAX_PATHS: usize = 500;
/// Maximum number of paths in each list of `layout`. Each costs a sandbox a mount.
pub const MAX_LAYOUT_PATHS: usize = 64;
/// Maximum length of a path in bytes, as in the kernel.
pub const MAX_PATH_BYTES: usize = 4096;
/// Maximum number of components of a path.
pub const MAX_PATH_COMPONENTS: usize = 64;
/// Maximum number of patterns in both lists of `command` together.
pub const MAX_PATTERNS: usize = 100;
/// Maximum length of a pattern or a name in bytes.
pub const MAX_TEXT_BYTES: usize = 4096;
/// Maximum memory of a compiled list of patterns in bytes.
pub const MAX_COMPILED_BYTES: usize = 1024 * 1024;
/// Maximum number of entries of every other list.
pub const MAX_ENTRIES: usize = 1000;
/// Maximum number of host patterns with a `*` inside a label in each list. Merging compares each of
/// them with all patterns of another policy.
pub const MAX_HOST_GLOBS: usize = 64;

/// Maximum number of volumes. Each costs a sandbox a mount.
pub const MAX_VOLUMES: usize = 16;

/// A policy with more entries is checked and carried out off the async runtime.
const LARGE_ENTRIES: usize = 32;

/// A policy, or a part of one, that is too large.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("has {found} {unit}, maximum is {maximum}; {remedy}")]
pub struct TooLarge {
    /// The path of the field in the document. Empty for the whole document.
    pub field: String,
    /// The size.
    pub found: usize,
    /// The largest size that is accepted.
    pub maximum: usize,
    /// What is counted.
    pub unit: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
}

const NAME_DIRECTORIES: &str = "name directories instead of the files in them";
const SHORTEN: &str = "shorten it";

/// Checks the length of a whole policy: of its text or of its message.
///
/// # Errors
/// It is longer than [`MAX_BYTES`].
pub fn check_bytes(bytes: usize) -> Result<(), TooLarge> {
    at_most("", bytes, MAX_BYTES, "bytes", NAME_DIRECTORIES)
}

fn at_most(
    field: impl fmt::Display,
    found: usize,
    maximum: usize,
    unit: &'static str,
    remedy: &'static str,
) -> Result<(), TooLarge> {
    if found <= maximum {
        return Ok(());
    }
    Err(TooLarge { field: field.to_string(), found, maximum, unit, remedy })
}

impl Policy {
    /// Checks the size of every list and text. Takes time linear in the size of the policy.
    ///
    /// # Errors
    /// Names the first field that is too large.
    pub fn check_size(&self) -> Result<(), TooLarge> {
        let mut paths = 0;
        for (field, list) in self.filesystem.lists() {
            paths += list.len();
            at_most(field, paths, MAX_PATHS, "paths in the lists of filesystem", NAME_DIRECTORIES)?;
            check_paths(field, list)?;
        }
        self.layout.check_size()?;
        let programs = self.process.allowed_executables.as_deref().unwrap_or_default();
        let mut patterns = 0;
        for (field, list) in self.command.lists() {
            patterns += list.len();
            let remedy = "join patterns with `|`";
            at_most(field, patterns, MAX_PATTERNS, "patterns in the lists of command", remedy)?;
            check_texts(field, list)?;
        }
        for (field, entries) in self.other_lists() {
            at_most(field, entries, MAX_ENTRIES, "entries", "remove some")?;
        }
        self.check_volumes_size()?;
        self.network.check_size()?;
        for (field, names) in self.names() {
            check_texts(field, names)?;
        }
        check_paths("process.allowed_executables", programs)?;
        check_paths("network.executables", self.network.executables.as_deref().unwrap_or_default())?;
        check_bytes(self.text_bytes())
    }

    fn check_volumes_size(&self) -> Result<(), TooLarge> {
        let volumes = self.filesystem.mounted_volumes();
        at_most("filesystem.volumes", volumes.len(), MAX_VOLUMES, "volumes", "remove some")?;
        for (at, volume) in volumes.iter().enumerate() {
            let field = format!("filesystem.volumes[{at}]");
            check_texts(&field, std::slice::from_ref(&volume.name))?;
            check_paths(&field, std::slice::from_ref(&volume.path))?;
        }
        Ok(())
    }

    /// Whether the cost of this policy is too high for the async runtime: it has many entries, or
    /// patterns, which must be compiled.
    #[must_use]
    pub fn is_large(&self) -> bool {
        let paths: usize = self.filesystem.lists().iter().map(|(_, list)| list.len()).sum();
        let others: usize = self.other_lists().iter().map(|(_, entries)| entries).sum();
        let patterns: usize = self.command.lists().iter().map(|(_, list)| list.len()).sum();
        patterns > 0 || paths + others > LARGE_ENTRIES
    }

    /// The number of entries of the lists that are neither paths to mount nor patterns.
    fn other_lists(&self) -> [(&'static str, usize); 11] {
        fn entries<T>(list: &Option<Vec<T>>) -> usize {
            list.as_ref().map_or(0, Vec::len)
        }
        [
            ("process.allowed_executables", entries(&self.process.allowed_executables)),
            ("network.allowed_hosts", entries(&self.network.allowed_hosts)),
            ("network.ask_hosts", entries(&self.network.ask_hosts)),
            ("network.blocked_hosts", self.network.blocked_hosts.len()),
            ("network.allowed_ports", entries(&self.network.allowed_ports)),
            ("network.credentials", entries(&self.network.credentials)),
            ("network.executables", entries(&self.network.executables)),
            ("resources.cpus", entries(&self.resources.cpus)),
            ("syscalls.names", self.syscalls.names.len()),
            ("environment.names", entries(&self.environment.names)),
            ("delegate", self.delegate.len()),
        ]
    }

    /// The lists of names.
    fn names(&self) -> [(&'static str, &[String]); 7] {
        let [allowed, ask, blocked] = self.network.host_lists();
        [
            allowed,
            ask,
            blocked,
            ("network.credentials", self.network.credentials.as_deref().unwrap_or_default()),
            ("syscalls.names", &self.syscalls.names),
            ("environment.names", self.environment.names.as_deref().unwrap_or_default()),
            ("delegate", &self.delegate),
        ]
    }

    /// The length of all texts together.
    fn text_bytes(&self) -> usize {
        let paths = self.filesystem.lists().into_iter().flat_map(|(_, list)| list);
        let programs =
            [&self.process.allowed_executables, &self.network.executables, &self.layout.executable_paths];
        let programs = programs.into_iter().flatten().flatten();
        let directories = self.layout.directories.iter().map(|directory| &directory.path);
        let paths = paths.chain(directories).chain(programs).map(|path| path.as_os_str().len());
        let texts = self.names().into_iter().chain(self.command.lists()).flat_map(|(_, list)| list);
        let volumes = self.filesystem.mounted_volumes().iter();
        let volumes = volumes.map(|volume| volume.name.len() + volume.path.as_os_str().len());
        paths.chain(texts.map(String::len)).chain(volumes).sum()
    }
}

impl LayoutPolicy {
    fn check_size(&self) -> Result<(), TooLarge> {
        let executable = self.executable_paths.as_deref().unwrap_or_default();
        let directories: Vec<_> = self.directories.iter().map(|directory| directory.path.clone()).collect();
        let lists = [("layout.directories", &*directories), ("layout.executable_paths", executable)];
        lists.into_iter().try_for_each(|(field, list)| {
            at_most(field, list.len(), MAX_LAYOUT_PATHS, "paths", "name directories above them")?;
            check_paths(field, list)
        })
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
            at_most(field, list.len(), MAX_ENTRIES, "entries", "remove some")
        })
    }
}

fn check_texts(field: &str, texts: &[String]) -> Result<(), TooLarge> {
    texts.iter().enumerate().try_for_each(|(at, text)| {
        at_most(format_args!("{field}[{at}]"), text.len(), MAX_TEXT_BYTES, "bytes", SHORTEN)
    })
}

fn check_paths(field: &str, paths: &[PathBuf]) -> Result<(), TooLarge> {
    for (at, path) in paths.iter().enumerate() {
        let field = format_args!("{field}[{at}]");
        at_most(field, path.as_os_str().len(), MAX_PATH_BYTES, "bytes", SHORTEN)?;
        let components = path.components().filter(|part| matches!(part, Component::Normal(_))).count();
        at_most(field, components, MAX_PATH_COMPONENTS, "components", SHORTEN)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ceilings;

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
        let globs = |count| Some((0..count).map(|n| format!("a{n}x*.example.com")).collect::<Vec<_>>());
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
