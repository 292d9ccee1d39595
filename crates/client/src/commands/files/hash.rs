//! Hashes in the names of partial files.

use std::hash::{DefaultHasher, Hash, Hasher};

/// A number that stands for a value, the same in later processes of this program.
pub(super) fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
