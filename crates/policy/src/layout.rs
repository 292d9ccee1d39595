//! The layout of a workspace: which part of it a command may change, and where files can be
//! executed.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{LayoutDirectory, LayoutPolicy, Mount, PathTrie, WORKSPACE};

impl LayoutPolicy {
    /// Whether it changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn is_read_only(&self) -> bool {
        self.read_only_workspace == Some(true)
    }

    fn directory_trie(&self) -> PathTrie<'_, &LayoutDirectory> {
        let mut trie = PathTrie::default();
        for directory in &self.directories {
            trie.insert(&directory.path, directory);
        }
        trie
    }

    /// The first directory that the layout above does not let commands change, by its index.
    pub(crate) fn first_outside(&self, upper: &Self) -> Option<usize> {
        let above = upper.directory_trie();
        self.directories.iter().position(|one| upper.is_read_only() && !above.covers(&one.path))
    }

    /// `directories` of both layouts. A directory stays if both let commands change it, with the
    /// smallest limit of those that contain it.
    pub(crate) fn merge_directories(&self, lower: &Self) -> Vec<LayoutDirectory> {
        let tries = [self, lower].map(|layout| (layout.is_read_only(), layout.directory_trie()));
        let limit = |path: &Path| {
            let limits = tries.iter().flat_map(|(_, trie)| trie.containing(path));
            limits.filter_map(|directory| directory.max_bytes).min()
        };
        let is_writable = |path: &Path| {
            tries.iter().all(|(is_read_only, trie)| !is_read_only || trie.covers(path))
        };
        let paths: BTreeSet<_> =
            self.directories.iter().chain(&lower.directories).map(|one| &one.path).collect();
        let kept = paths.into_iter().filter(|path| is_writable(path));
        kept.map(|path| LayoutDirectory { path: path.clone(), max_bytes: limit(path) }).collect()
    }
}

/// The layout of one sandbox: what is changed in its mounts once they are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Whether commands can change the workspace itself.
    pub writable: bool,
    /// Whether files in the workspace itself can be executed.
    pub executable: bool,
    /// Directories that are created before the sandbox, relative to the workspace, parents first.
    pub directories: Vec<PathBuf>,
    /// Directories that need a mount of their own, relative to the workspace, parents first.
    pub mounts: Vec<LayoutMount>,
    /// Other mounts, by their path inside, from which nothing can be executed.
    pub not_executable: Vec<PathBuf>,
    /// Maximum size of directories, relative to the workspace, in bytes.
    pub limits: BTreeMap<PathBuf, u64>,
}

/// A directory of the workspace with a mount of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutMount {
    /// The path, relative to the workspace.
    pub path: PathBuf,
    /// Whether commands can change it.
    pub writable: bool,
    /// Whether files below it can be executed.
    pub executable: bool,
}

impl Layout {
    /// The layout of a policy over the mounts of a plan; `None` if the policy has none.
    pub(crate) fn from_policy(policy: &LayoutPolicy, mounts: &[Mount]) -> Option<Self> {
        if policy.is_empty() {
            return None;
        }
        let executables = policy.executable_paths.as_ref();
        let directories: BTreeSet<_> = policy
            .directories
            .iter()
            .map(|one| &one.path)
            .chain(executables.into_iter().flatten())
            .collect();
        let writable = !policy.is_read_only();
        let executable = executables.is_none();
        let mut layout = Self {
            writable,
            executable,
            mounts: Vec::new(),
            not_executable: if executable { Vec::new() } else { writable_targets(mounts) },
            limits: policy
                .directories
                .iter()
                .filter_map(|one| one.max_bytes.map(|bytes| (one.path.clone(), bytes)))
                .collect(),
            directories: directories.into_iter().cloned().collect(),
        };
        let trie = policy.directory_trie();
        for path in &layout.directories {
            let is_below = |list: &Vec<PathBuf>| list.iter().any(|upper| path.starts_with(upper));
            let mount = LayoutMount {
                path: path.clone(),
                writable: writable || trie.covers(path),
                executable: executables.is_none_or(is_below),
            };
            // A mount that changes nothing would only separate directories from each other.
            if (mount.writable, mount.executable) != layout.access(path) {
                layout.mounts.push(mount);
            }
        }
        Some(layout)
    }

    /// Whether a path can be changed and executed with the mounts so far.
    fn access(&self, path: &Path) -> (bool, bool) {
        let above = self.mounts.iter().rev().find(|mount| path.starts_with(&mount.path));
        above.map_or((self.writable, self.executable), |mount| (mount.writable, mount.executable))
    }

    /// Descriptions of what it changes in the mounts, for people.
    #[must_use]
    pub fn descriptions(&self) -> Vec<String> {
        let workspace = LayoutMount {
            path: PathBuf::new(),
            writable: self.writable,
            executable: self.executable,
        };
        let other = self.not_executable.iter().map(|path| format!("{} noexec", path.display()));
        std::iter::once(&workspace)
            .chain(&self.mounts)
            .map(LayoutMount::description)
            .chain(other)
            .collect()
    }
}

impl LayoutMount {
    fn description(&self) -> String {
        let path = if self.path.as_os_str().is_empty() {
            PathBuf::from(WORKSPACE)
        } else {
            Path::new(WORKSPACE).join(&self.path)
        };
        let access = if self.writable { "read-write" } else { "read-only" };
        let execution = if self.executable { "" } else { ", noexec" };
        format!("{} {access}{execution} by layout", path.display())
    }
}

/// The mounts that a command can write to, except its workspace.
fn writable_targets(mounts: &[Mount]) -> Vec<PathBuf> {
    let is_writable = |mount: &&Mount| match mount {
        Mount::Bind { writable, .. } => *writable,
        Mount::Overlay { .. } | Mount::Transaction { .. } | Mount::Tmpfs { .. } => true,
        // Another session may have written to it.
        Mount::Volume { .. } => true,
        Mount::Runtime { .. } | Mount::Proc | Mount::Dev => false,
        Mount::Symlink { .. } | Mount::File { .. } | Mount::Hidden { .. } => false,
    };
    let targets = mounts.iter().filter(is_writable).map(Mount::target);
    targets.filter(|target| *target != Path::new(WORKSPACE)).map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Format, Policy};

    fn layout(text: &str) -> LayoutPolicy {
        Policy::parse(&format!("layout: {text}"), Format::Yaml).unwrap().layout
    }

    fn directories(layout: &LayoutPolicy) -> Vec<(&str, Option<u64>)> {
        layout.directories.iter().map(|one| (one.path.to_str().unwrap(), one.max_bytes)).collect()
    }

    fn merge(upper: &LayoutPolicy, lower: &LayoutPolicy) -> LayoutPolicy {
        let policy = |layout: &LayoutPolicy| Policy { layout: layout.clone(), ..Policy::default() };
        policy(upper).merge(&policy(lower)).layout
    }

    #[test]
    fn lower_layout_opens_nothing() {
        let upper =
            layout("{read_only_workspace: true, directories: [{path: target, max_bytes: 5}]}");
        let lower = layout(
            "{directories: [{path: target/debug, max_bytes: 9}, {path: logs}, {path: target}]}",
        );
        let merged = merge(&upper, &lower);
        assert_eq!(merged.read_only_workspace, Some(true));
        assert_eq!(directories(&merged), [("target", Some(5)), ("target/debug", Some(5))]);
        assert_eq!(lower.first_outside(&upper), Some(1));
        let both = merge(&layout("{read_only_workspace: true}"), &upper);
        assert_eq!(directories(&both), [], "a read-only workspace without directories has none");
    }

    #[test]
    fn executable_paths_are_intersected() {
        let merged =
            |upper: &str, lower: &str| merge(&layout(upper), &layout(lower)).executable_paths;
        let paths = |list: &[&str]| Some(list.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(merged("{}", "{executable_paths: [a]}"), paths(&["a"]));
        assert_eq!(
            merged("{executable_paths: [a, b]}", "{executable_paths: [a/c, d]}"),
            paths(&["a/c"])
        );
    }

    fn plan(text: &str) -> Layout {
        let mounts = [
            Mount::Tmpfs { target: "/tmp".into(), size_bytes: 1 },
            Mount::Bind { source: "/s".into(), target: WORKSPACE.into(), writable: true },
            Mount::Bind { source: "/opt".into(), target: "/opt".into(), writable: false },
            Mount::Bind { source: "/srv".into(), target: "/srv".into(), writable: true },
        ];
        Layout::from_policy(&layout(text), &mounts).unwrap()
    }

    #[test]
    fn only_what_differs_gets_a_mount() {
        let mounts = |text: &str| {
            let mounts = plan(text).mounts;
            let words = mounts
                .iter()
                .map(|one| (one.path.display().to_string(), one.writable, one.executable));
            words.collect::<Vec<_>>()
        };
        let one = |path: &str, writable, executable| (path.to_owned(), writable, executable);
        assert_eq!(mounts("{directories: [{path: target}]}"), []);
        assert_eq!(
            mounts(
                "{read_only_workspace: true, directories: [{path: target}, {path: target/debug}]}"
            ),
            [one("target", true, true)]
        );
        assert_eq!(
            mounts(
                "{read_only_workspace: true, directories: [{path: logs}, {path: target}], \
                 executable_paths: [bin, target/debug]}"
            ),
            [
                one("bin", false, true),
                one("logs", true, false),
                one("target", true, false),
                one("target/debug", true, true)
            ]
        );
    }

    #[test]
    fn everything_writable_loses_execution() {
        let layout = plan("{executable_paths: [target]}");
        assert_eq!(layout.not_executable, [PathBuf::from("/tmp"), PathBuf::from("/srv")]);
        assert_eq!((layout.writable, layout.executable), (true, false));
        assert_eq!(plan("{read_only_workspace: true}").not_executable, Vec::<PathBuf>::new());
    }
}
