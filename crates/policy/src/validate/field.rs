//! Checks of single values: list lengths and paths.

use std::path::{Component, Path, PathBuf};

use super::{PolicyError, fail};

/// The maximum number of entries of a list.
pub(super) const MAX_ENTRIES: usize = 1000;
/// The maximum length of a text, in bytes.
pub(super) const MAX_TEXT: usize = 4096;

/// Checks the number of entries of a list.
pub(super) fn check_entries(field: &str, entries: usize, max: usize) -> Result<(), PolicyError> {
    if entries > max {
        return fail(field, format!("has {entries} entries, maximum is {max}"));
    }
    Ok(())
}

/// Checks that a path is absolute and normalized, so that paths compare by their components.
pub(super) fn check_path(field: &str, path: &Path) -> Result<(), PolicyError> {
    let text = path.as_os_str().as_encoded_bytes();
    if text.len() > MAX_TEXT {
        return fail(field, format!("has {} bytes, maximum is {MAX_TEXT}", text.len()));
    }
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
