//! The sessions that the worker holds under its lease: taken, used, given up.

pub(crate) mod acquire;
pub(crate) mod disk_report;
pub(crate) mod queue;
pub(crate) mod spare_maker;
pub(crate) mod table;
