//! A file or directory of a local directory that is copied.

/// A file or directory below a directory that the user named.
#[derive(Debug)]
pub(super) struct LocalEntry {
    /// Names from the root to the file.
    pub(super) path: Vec<String>,
    pub(super) kind: LocalKind,
    pub(super) size: u64,
}

/// The kind of a local file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(unix), allow(dead_code, reason = "there are no local trees"))]
pub(super) enum LocalKind {
    Directory,
    File,
    /// A link or a special file, which is not copied.
    Other,
}
