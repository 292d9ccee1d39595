//! Session directories: creates, owns and removes them.

pub(crate) mod removal_backoff;
pub(crate) mod root;
pub(crate) mod transaction;
pub(crate) mod trash;
pub(crate) mod uid_range;
pub(crate) mod user_ids;
pub(crate) mod volumes;
