//! The floors: what a run cannot be faster than, each with nothing but itself.

pub(crate) mod exec;
pub(crate) mod postgres;
