//! The largest sizes, and the error of what is larger.

use std::fmt;

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

/// A policy, or a part of one, that is too large.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("has {found} {unit}, maximum is {maximum}; {remedy}")]
pub struct TooLarge {
    /// The path of the field in the document. Empty for the whole document.
    pub field: String,
    /// The size of the field.
    pub found: usize,
    /// The largest size that is accepted.
    pub maximum: usize,
    /// The unit of both sizes.
    pub unit: &'static str,
    /// A way to make it smaller.
    pub remedy: &'static str,
}

const NAME_DIRECTORIES: &str = "name directories instead of the files in them";
pub(super) const SHORTEN: &str = "shorten it";

/// Checks the length of a whole policy: of its text or of its message.
///
/// # Errors
/// The policy is longer than [`MAX_BYTES`].
pub fn check_bytes(bytes: usize) -> Result<(), TooLarge> {
    at_most("", bytes, MAX_BYTES, "bytes", NAME_DIRECTORIES)
}

/// The maximum number of entries of a list.
pub(super) struct Maximum {
    entries: usize,
    unit: &'static str,
    remedy: &'static str,
}

pub(super) const ENTRIES: Maximum =
    Maximum { entries: MAX_ENTRIES, unit: "entries", remedy: "remove some" };
pub(super) const VOLUMES: Maximum =
    Maximum { entries: MAX_VOLUMES, unit: "volumes", remedy: "remove some" };
pub(super) const LAYOUT_PATHS: Maximum =
    Maximum { entries: MAX_LAYOUT_PATHS, unit: "paths", remedy: "name directories above them" };
pub(super) const PATHS: Maximum = Maximum {
    entries: MAX_PATHS,
    unit: "paths in the lists of filesystem",
    remedy: NAME_DIRECTORIES,
};
pub(super) const PATTERNS: Maximum = Maximum {
    entries: MAX_PATTERNS,
    unit: "patterns in the lists of command",
    remedy: "join patterns with `|`",
};

impl Maximum {
    pub(super) fn check(&self, field: &str, entries: usize) -> Result<(), TooLarge> {
        at_most(field, entries, self.entries, self.unit, self.remedy)
    }
}

pub(super) fn at_most(
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
