//! Sandboxes: the traits, the modes, the probe.
//!
//! `policy → plan → backend`. A backend carries a plan out whole or refuses it; there is no weaker
//! second try. The same `codelia-init` waits inside every sandbox, so a plan means the same thing
//! in every mode.

#![forbid(unsafe_code)]

mod backend;
mod bwrap;
mod container;
mod control;
mod ending;
mod error;
mod groups;
mod hidden;
mod holder;
mod idle;
mod init;
mod isolating;
mod logical;
mod nsjail;
mod orphans;
mod overlay;
mod prepared;
mod process;
mod running;
mod runtime;
mod sandbox;
mod scratch;
mod seccomp;
mod setup;
mod supervisor;
mod tool;

pub use backend::{Backend, Capabilities, Gap, Launched, Prepared, Running, Stdio};
pub use bwrap::{BwrapOptions, bwrap};
pub use codelia_sys::cgroup::Parent;
pub use container::{ContainerOptions, container};
pub use error::Error;
pub use init::find_init;
pub use logical::{Logical, LogicalOptions};
pub use nsjail::{NsjailOptions, nsjail};
pub use runtime::runtime;
