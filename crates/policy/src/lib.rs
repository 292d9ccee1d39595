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
    IsolationLevel, NetworkPolicy, Policy, ProcessPolicy, ResourcePolicy, SyscallMode, SyscallPolicy,
};
pub use explain::{ExplainedField, Source};
pub use files::{FileAccess, FileDenied};
pub use format::{Format, ParseError, UnknownFormat, WriteError};
pub use limits::{Ceilings, Limit, LimitError, Limits, LimitsRequest};
pub use mounts::{Mount, OVERLAYS_SUFFIX, SANDBOX_IDS, WORKSPACE, overlays_dir};
pub use plan::{Enforceable, HostInfo, Ids, IoLimits, Plan, PlanError, PlanTarget, Security, SyscallRules};
pub use run_spec::RunSpec;
pub use runtime::{PathKind, Runtime};
pub use secrets::home_dirs;
pub use validate::PolicyError;
