//! What file calls may do in a session's workspace: what its commands may, by the same policy.

use std::path::{Component, Path};

use crate::{FilesystemPolicy, WORKSPACE};

/// What a file call does to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAccess {
    /// Looks at it.
    Read,
    /// Changes it, or makes it.
    Write,
    /// Takes it away with all that is below: moves, removes or replaces it.
    Replace,
}

/// The policy forbids a file call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("forbidden by {rule}")]
pub struct FileDenied {
    /// The rule, by its path in the document.
    pub rule: &'static str,
}

impl FilesystemPolicy {
    /// Decides a file call. The path is one that commands see, with symlinks followed.
    ///
    /// The decision is that of the mounts that a command meets: the workspace is writable, the
    /// deepest path that the policy opens counts, and what is denied is denied whatever is around it.
    ///
    /// # Errors
    /// Names the rule that forbids it.
    pub fn check_file(&self, what: FileAccess, path: &Path) -> Result<(), FileDenied> {
        let deny = |rule| Err(FileDenied { rule });
        let has_detours = path.components().any(|part| part == Component::ParentDir);
        if has_detours || !path.starts_with(WORKSPACE) {
            return deny("filesystem.root_path");
        }
        if self.denied_paths.iter().any(|no| path.starts_with(no)) {
            return deny("filesystem.denied_paths");
        }
        if what == FileAccess::Read {
            return Ok(());
        }
        let taken_along = |inside: &Path| what == FileAccess::Replace && inside.starts_with(path);
        if self.denied_paths.iter().any(|no| taken_along(no)) {
            return deny("filesystem.denied_paths");
        }
        if !self.is_writable(path) || self.opened(false).any(taken_along) {
            return deny("filesystem.read_only_paths");
        }
        Ok(())
    }

    /// Whether the deepest of what is mounted around the path can be written; the workspace itself can.
    fn is_writable(&self, path: &Path) -> bool {
        let deepest = |writable| {
            let around = self.opened(writable).filter(|open| path.starts_with(open));
            around.map(|open| open.components().count()).max()
        };
        // Of two mounts at one place the writable one is made later.
        deepest(true) >= deepest(false)
    }

    /// The paths that it opens, but for those that it also denies.
    fn opened(&self, writable: bool) -> impl Iterator<Item = &Path> {
        let paths = if writable { &self.read_write_paths } else { &self.read_only_paths };
        let is_denied = |path: &Path| self.denied_paths.iter().any(|no| path.starts_with(no));
        paths.iter().flatten().map(AsRef::as_ref).filter(move |path| !is_denied(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(what: FileAccess, path: &str) -> Option<&'static str> {
        let policy = FilesystemPolicy {
            read_only_paths: Some(vec!["/workspace/fixed".into(), "/opt".into()]),
            read_write_paths: Some(vec!["/workspace/fixed/open".into()]),
            denied_paths: vec!["/workspace/a/secret".into()],
            ..FilesystemPolicy::default()
        };
        policy.check_file(what, Path::new(path)).err().map(|denied| denied.rule)
    }

    #[test]
    fn each_use_is_decided_by_the_deepest_rule() {
        use FileAccess::{Read, Replace, Write};
        const FIXED: Option<&str> = Some("filesystem.read_only_paths");
        const SECRET: Option<&str> = Some("filesystem.denied_paths");
        const OUTSIDE: Option<&str> = Some("filesystem.root_path");
        for (what, path, expected) in [
            (Write, "/workspace/x", None),
            (Read, "/workspace/fixed/x", None),
            (Write, "/workspace/fixed/x", FIXED),
            (Write, "/workspace/fixed", FIXED),
            (Write, "/workspace/fixed/open/x", None),
            (Read, "/workspace/a/secret", SECRET),
            (Write, "/workspace/a/secret/x", SECRET),
            (Write, "/workspace/a/secretive", None),
            (Write, "/workspace/a", None),
            (Replace, "/workspace/a", SECRET),
            (Replace, "/workspace", SECRET),
            (Replace, "/workspace/b", None),
            (Read, "/opt/x", OUTSIDE),
            (Read, "/workspace/../etc/passwd", OUTSIDE),
            (Read, "/workspacex", OUTSIDE),
        ] {
            assert_eq!(rule(what, path), expected, "{what:?} {path}");
        }
    }
}
