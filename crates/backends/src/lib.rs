//! Sandboxes: the traits, the modes, the probe.
//!
//! `policy → plan → backend`. A backend carries a plan out whole or refuses it; there is no weaker
//! second try. The same `codelia-init` waits inside every sandbox, so a plan means the same thing
//! in every mode.

#![forbid(unsafe_code)]

mod backend;
mod container;
mod error;
mod host_runtime;
mod init;
mod logical;
mod probe;
mod sandbox;
mod seccomp;
mod tool;

pub use backend::{Backend, Capabilities, Gap, Launched, Prepared, Running, Stdio};
pub use codelia_sys::cgroup::CgroupParent;
pub use container::{ContainerOptions, container};
pub use error::Error;
pub use host_runtime::host_runtime;
pub use init::find_init;
pub use logical::{Logical, LogicalOptions};
pub use tool::{bwrap::bwrap, nsjail::nsjail, tool_backend::ToolOptions};
