//! Checks of single values.

use std::path::{Component, Path, PathBuf};

use super::error::{PolicyError, fail};

/// Checks that a path is absolute and normalized, so that paths compare by their components.
pub(super) fn check_path(field: &str, path: &Path) -> Result<(), PolicyError> {
    let text = path.as_os_str().as_encoded_bytes();
    if !path.is_absolute() {
        return fail(field, "must be absolute");
    }
    if text.contains(&0) || path.components().any(|part| part == Component::ParentDir) {
        return fail(field, "must not contain `..` or a null byte");
    }
    let normalized: PathBuf = path.components().collect();
    if normalized.as_os_str() != path.as_os_str() {
        return fail(field, format!("must be normalized: {}", normalized.display()));
    }
    Ok(())
}
