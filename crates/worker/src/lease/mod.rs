//! The worker's lease and the sessions that it holds under it.

pub(crate) mod drain_state;
pub(crate) mod keeper;
pub(crate) mod progress;
pub(crate) mod worker_lease;
