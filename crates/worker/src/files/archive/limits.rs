//! Limits of every archive.

use std::time::Duration;

/// Files, directories and links in an archive.
pub(super) const MAX_ENTRIES: u64 = 200_000;
/// Bytes of an archive, without compression.
pub(super) const MAX_BYTES: u64 = 64 << 30;
/// Levels of directories. An export holds two descriptors for each.
pub(super) const MAX_DEPTH: usize = 100;
/// The kernel's limit for a path.
pub(super) const MAX_PATH: usize = 4095;
/// How long one archive may take.
pub(super) const MAX_DURATION: Duration = Duration::from_secs(3600);
