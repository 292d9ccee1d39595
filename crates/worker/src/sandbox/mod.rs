//! The sandboxes of this worker: its backends, spare sandboxes, and receipts.

pub(crate) mod backends;
pub(crate) mod receipts;
pub(crate) mod spare_maker;
pub(crate) mod spare_pool;
