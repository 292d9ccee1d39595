//! One sandbox as the host sees it, shared by every mode.

pub(crate) mod control;
pub(crate) mod groups;
pub(crate) mod outcome;
pub(crate) mod prepared;
pub(crate) mod process;
pub(crate) mod running;
#[allow(clippy::module_inception)]
pub(crate) mod sandbox;
pub(crate) mod sandbox_process;
pub(crate) mod setup;
pub(crate) mod supervisor;
