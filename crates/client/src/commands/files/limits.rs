//! Limits of what is copied and listed.

/// Permissions that a copy keeps: neither set-user-id, nor set-group-id, nor sticky.
pub(super) const MODE_MASK: u32 = 0o777;
/// Entries of a directory that is copied or listed recursively.
pub(super) const MAX_ENTRIES: usize = 100_000;
/// Levels of directories below one that is copied or listed recursively.
pub(super) const MAX_DEPTH: usize = 100;
