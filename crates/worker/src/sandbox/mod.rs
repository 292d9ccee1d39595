//! The sandboxes of this worker: its backends, spare sandboxes, and receipts.

pub(crate) mod backends;
pub(crate) mod canary;
pub(crate) mod receipts;
pub(crate) mod spare_pool;
