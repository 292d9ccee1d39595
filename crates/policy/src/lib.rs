//! Policy documents, defaults, ceilings, merging, validation, and the plans made from them.
//!
//! Pure: no I/O, no async, no clock.

#![forbid(unsafe_code)]

mod document;
mod explain;
mod files;
mod format;
mod limits;
mod merge;
mod mounts;
mod plan;
mod run_spec;
mod runtime;
mod secrets;
pub mod syscalls;
mod validate;

pub use document::{
    CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode, FilesystemPolicy,
    Level, NetworkPolicy, Policy, ProcessPolicy, ResourcePolicy, SyscallMode, SyscallPolicy,
};
pub use explain::{Explained, Source};
pub use files::{FileDenied, FileUse};
pub use format::{Format, ParseError, UnknownFormat, WriteError};
pub use limits::{Ceilings, Limit, LimitError, Limits, LimitsRequest};
pub use mounts::{INSIDE, Mount, OVERLAYS_END, WORKSPACE, overlays_of};
pub use plan::{Enforceable, Host, Ids, IoLimits, Plan, PlanError, Security, SyscallRules};
pub use run_spec::RunSpec;
pub use runtime::{Found, Runtime};
pub use secrets::homes;
pub use validate::PolicyError;
