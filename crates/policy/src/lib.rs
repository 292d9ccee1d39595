//! The words of Codelia as types: ids, modes, limits, plans, commands, outcomes.
//!
//! Pure: no I/O, no async, no clock. Everything else depends on this crate; it depends on none
//! of the others.

#![forbid(unsafe_code)]

mod command;
mod document;
mod explain;
mod files;
mod format;
mod id;
mod limits;
mod merge;
mod mode;
mod mounts;
mod outcome;
mod plan;
mod runtime;
mod secrets;
pub mod syscalls;
mod validate;
mod violation;

pub use command::{CommandSpec, RunSpec, TerminalSize};
pub use document::{
    CommandPolicy, ContainerPolicy, EnvironmentMode, EnvironmentPolicy, FilesystemMode, FilesystemPolicy,
    Level, NetworkPolicy, Policy, ProcessPolicy, ResourcePolicy, SyscallMode, SyscallPolicy,
};
pub use explain::{Explained, Source};
pub use files::{FileDenied, FileUse};
pub use format::{Format, ParseError, UnknownFormat, WriteError};
pub use id::{Incarnation, InvalidId, KeyId, LeaseEpoch, RunId, SessionId, TenantId, WorkerId};
pub use limits::{Ceilings, LimitError, Limits, LimitsRequest};
pub use mode::{Mode, NetworkMode, UnknownWord};
pub use mounts::{INSIDE, Mount, OVERLAYS_END, WORKSPACE, overlays_of};
pub use outcome::{Outcome, Receipt, Refusal, Usage};
pub use plan::{Enforceable, Host, Ids, IoLimits, Plan, PlanError, Security, SyscallRules};
pub use runtime::{Found, Runtime};
pub use secrets::homes;
pub use validate::PolicyError;
pub use violation::{Repeated, Violation, Violations};
