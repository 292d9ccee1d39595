//! The backends of this worker, and the receipts of its sandboxes.

pub(crate) mod backends;
pub(crate) mod receipts;
