//! Policies: the service, what is stored, and what a session is held to.

pub(crate) mod cache;
pub(crate) mod effective;
pub(crate) mod service;
pub(crate) mod stored;
