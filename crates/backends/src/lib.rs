//! Sandboxes: the traits, the modes and the probe.
//!
//! `policy → plan → backend`. A backend enforces the whole plan or refuses it; there is no weaker
//! fallback. The same `codelia-init` runs inside every sandbox, so a plan means the same in every
//! mode.
//!
//! Start reading at [`Backend`]. The modes: [`Logical`], [`bwrap()`], [`nsjail()`], [`native()`],
//! [`container()`].

#![forbid(unsafe_code)]

mod alias;
mod backend;
mod container;
mod error;
mod host_mode;
mod host_runtime;
mod init_binary;
mod isolation;
mod logical;
mod mask;
mod mounts;
mod native;
mod probe;
mod sandbox;
mod seccomp;
mod tool;
mod usage_reader;

#[cfg(test)]
#[path = "../../../tests/src/require.rs"]
mod require;

pub use backend::{
    Backend, Capabilities, EgressSockets, Gap, Launched, Prepared, Running, SandboxRemote, Stdio,
};
pub use codelia_sys::{
    cgroup::{CgroupParent, CurrentUsage},
    process::ListedProcess,
};
pub use container::{ContainerOptions, container};
pub use error::Error;
pub use host_mode::HostOptions;
pub use host_runtime::host_runtime;
pub use init_binary::find_init;
pub use logical::{Logical, LogicalOptions};
pub use native::{NativeOptions, native};
pub use sandbox::{
    cgroups::can_enforce_limits,
    isolation_check::{Drift, IsolationCheck},
    operations::{Operation, Operations},
    reads::{AskedReads, ReadDecision, ReadRequest, Reader},
};
pub use tool::{ToolOptions, bwrap::bwrap, nsjail::nsjail};
pub use usage_reader::UsageReader;
