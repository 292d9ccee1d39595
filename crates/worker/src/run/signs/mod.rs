//! Observations of a command: violations, logged operations, signs of an escape.

pub(crate) mod canary;
pub(crate) mod escape;
pub(crate) mod operations;
pub(crate) mod violations;
