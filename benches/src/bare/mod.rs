//! Lower bounds: the unavoidable parts of a run, each on its own.

pub(crate) mod exec;
pub(crate) mod postgres;
