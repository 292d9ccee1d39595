//! The worker's lease and the sessions that it holds under it.

pub(crate) mod acquire;
pub(crate) mod drain;
pub(crate) mod drain_state;
pub(crate) mod keeper;
pub(crate) mod poll;
pub(crate) mod queued_sessions;
pub(crate) mod registration;
pub(crate) mod sessions;
pub(crate) mod turns;
pub(crate) mod worker_lease;
