//! Which file calls a policy allows in a session's workspace: the same as for its commands.

use std::path::{Component, Path};

use crate::{FilesystemPolicy, WORKSPACE};

/// How a file call accesses a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileAccess {
    /// Reads the file or its attributes.
    Read,
    /// Changes or creates the file.
    Write,
    /// Moves, removes or replaces the file with everything below it.
    Replace,
}

/// The policy denies a file call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("denied by policy rule {rule}")]
pub struct FileDenied {
    /// The path of the rule in the document.
    pub rule: &'static str,
}

impl FilesystemPolicy {
    /// Checks a file call. The path is the one that commands see, with symlinks resolved.
    ///
    /// The result equals what the mounts of a command allow: the workspace is writable, the deepest
    /// path that the policy opens decides, and a denied path is denied wherever it is.
    ///
    /// # Errors
    /// Names the rule that denies the call.
    pub fn check_file(&self, access: FileAccess, path: &Path) -> Result<(), FileDenied> {
        let deny = |rule| Err(FileDenied { rule });
        let has_parent = path.components().any(|part| part == Component::ParentDir);
        if has_parent || !path.starts_with(WORKSPACE) {
            return deny("filesystem");
        }
        if self.denied_paths.iter().any(|denied| path.starts_with(denied)) {
            return deny("filesystem.denied_paths");
        }
        if access == FileAccess::Read {
            return Ok(());
        }
        let is_replaced = |inside: &Path| access == FileAccess::Replace && inside.starts_with(path);
        if self.denied_paths.iter().any(|denied| is_replaced(denied)) {
            return deny("filesystem.denied_paths");
        }
        if !self.is_writable(path) || self.opens(false, is_replaced).next().is_some() {
            return deny("filesystem.read_only_paths");
        }
        Ok(())
    }

    /// Whether the deepest mount that contains the path is writable. The workspace itself is.
    fn is_writable(&self, path: &Path) -> bool {
        let deepest = |writable| {
            let containing = self.opens(writable, |open| path.starts_with(open));
            containing.map(|open| open.components().count()).max()
        };
        // Of two mounts at the same path, the writable one is made later.
        deepest(true) >= deepest(false)
    }

    /// The paths with this property that the policy opens, except those that it also denies.
    fn opens(&self, writable: bool, has: impl Fn(&Path) -> bool) -> impl Iterator<Item = &Path> {
        let paths = if writable { &self.read_write_paths } else { &self.read_only_paths };
        let is_denied =
            |path: &Path| self.denied_paths.iter().any(|denied| path.starts_with(denied));
        paths.iter().flatten().map(AsRef::as_ref).filter(move |path| has(path) && !is_denied(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(access: FileAccess, path: &str) -> Option<&'static str> {
        let policy = FilesystemPolicy {
            read_only_paths: Some(vec!["/workspace/fixed".into(), "/opt".into()]),
            read_write_paths: Some(vec!["/workspace/fixed/open".into()]),
            denied_paths: vec!["/workspace/a/secret".into()],
            ..FilesystemPolicy::default()
        };
        policy.check_file(access, Path::new(path)).err().map(|denied| denied.rule)
    }

    #[test]
    fn deepest_rule_decides_access() {
        use FileAccess::{Read, Replace, Write};
        const FIXED: Option<&str> = Some("filesystem.read_only_paths");
        const SECRET: Option<&str> = Some("filesystem.denied_paths");
        const OUTSIDE: Option<&str> = Some("filesystem");
        for (access, path, expected) in [
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
            assert_eq!(rule(access, path), expected, "{access:?} {path}");
        }
    }
}
