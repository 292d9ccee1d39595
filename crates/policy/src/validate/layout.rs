//! Validation of the layout of a workspace.

use std::path::{Component, Path, PathBuf};

use super::error::{PolicyError, fail};
use crate::LayoutPolicy;

pub(super) const DIRECTORIES: &str = "layout.directories";
pub(super) const EXECUTABLE_PATHS: &str = "layout.executable_paths";

impl LayoutPolicy {
    pub(super) fn validate(&self) -> Result<(), PolicyError> {
        for (at, directory) in self.directories.iter().enumerate() {
            check_relative(&format!("{DIRECTORIES}[{at}].path"), &directory.path)?;
            if directory.max_bytes == Some(0) {
                return fail(format!("{DIRECTORIES}[{at}].max_bytes"), "must be at least 1");
            }
            if self.directories[..at].iter().any(|earlier| earlier.path == directory.path) {
                return fail(format!("{DIRECTORIES}[{at}].path"), "is named twice");
            }
        }
        let mut executable = self.executable_paths.iter().flatten().enumerate();
        executable
            .try_for_each(|(at, path)| check_relative(&format!("{EXECUTABLE_PATHS}[{at}]"), path))
    }
}

/// Checks that a path is below the workspace and normalized, so that paths compare by their
/// components.
fn check_relative(field: &str, path: &Path) -> Result<(), PolicyError> {
    let is_name = |part: Component<'_>| matches!(part, Component::Normal(_));
    let text = path.as_os_str();
    if text.is_empty() || !path.components().all(is_name) || text.as_encoded_bytes().contains(&0) {
        return fail(field, "must be relative to the workspace, without `.`, `..` or a null byte");
    }
    let normalized: PathBuf = path.components().collect();
    if normalized.as_os_str() != text {
        return fail(field, format!("must be normalized: {}", normalized.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{Ceilings, Format, Policy};

    fn field(layout: &str) -> Option<String> {
        let policy = Policy::parse(&format!("layout: {layout}"), Format::Yaml).unwrap();
        policy.validate(&Ceilings::default()).err().map(|error| error.field)
    }

    #[test]
    fn invalid_layout_is_refused_by_field() {
        let good = "{read_only_workspace: true, directories: [{path: a/b, max_bytes: 1}], executable_paths: [a]}";
        assert_eq!(field(good), None);
        for path in ["/a", "..", "a/../b", "'.'", "a//b", "''"] {
            let directory = field(&format!("{{directories: [{{path: {path}}}]}}"));
            assert_eq!(directory.as_deref(), Some("layout.directories[0].path"), "{path}");
            let executable = field(&format!("{{executable_paths: [a, {path}]}}"));
            assert_eq!(executable.as_deref(), Some("layout.executable_paths[1]"), "{path}");
        }
        let twice = field("{directories: [{path: a}, {path: a}]}");
        assert_eq!(twice.as_deref(), Some("layout.directories[1].path"));
        let empty = field("{directories: [{path: a, max_bytes: 0}]}");
        assert_eq!(empty.as_deref(), Some("layout.directories[0].max_bytes"));
        let many: Vec<_> = (0..65).map(|n| format!("{{path: d{n}}}")).collect();
        let many = field(&format!("{{directories: [{}]}}", many.join(", ")));
        assert_eq!(many.as_deref(), Some("layout.directories"));
    }
}
