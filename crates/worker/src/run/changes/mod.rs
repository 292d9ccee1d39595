//! The changes of transactional runs, and the decision about them.

pub(crate) mod held;
pub(crate) mod transaction;
