//! Session leases: keeping, acquiring, finding and giving up sessions.

pub(crate) mod acquire;
pub(crate) mod drain;
pub(crate) mod keeper;
pub(crate) mod poll;
pub(crate) mod sessions;
