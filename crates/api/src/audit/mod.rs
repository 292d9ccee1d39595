//! The audit: the service that lists it, and the refusals that are recorded in it.

pub(crate) mod refusals;
pub(crate) mod service;

pub(crate) use refusals::record;
