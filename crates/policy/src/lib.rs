//! Policies of commands: documents, limits, and the plans made from them.
//!
//! The way from a document to a sandbox:
//!
//! 1. [`Policy::parse`] reads a document in JSON, YAML or TOML ([`Format`]).
//! 2. [`Policy::validate`] refuses what is too large ([`size`]), out of range or contradicts
//!    itself, and [`Policy::check_within`] what the policy above does not allow. An error names the
//!    field.
//! 3. [`Policy::merge`] combines the policies of installation, session and run. Merging only
//!    tightens. [`Scopes`] are the policies between installation and session, which may delegate
//!    fields. [`DryRun`] shows what a policy would change for a run. [`Policy::explain`] shows the
//!    source of each field of the result.
//! 4. [`LimitsRequest::resolve`] turns requested limits into [`Limits`], within the [`Ceilings`].
//! 5. [`Plan::isolated`] and [`Plan::logical`] make the effective policy concrete for one sandbox.
//!    See [`Plan`] for an example.
//!
//! This crate is pure: no I/O, no async code, no clock.

#![forbid(unsafe_code)]

mod caps;
mod declaration_error;
mod document;
mod dry_run;
mod egress;
mod escape;
mod explain;
mod fields;
mod files;
mod flags;
mod format;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod host_sets;
mod hosts;
mod ids;
mod layout;
mod limits;
mod merge;
mod mounts;
mod network;
mod path_trie;
mod plan;
mod profile;
mod run_spec;
mod runtime;
mod scopes;
mod secrets;
pub mod size;
pub mod syscalls;
mod tool;
mod validate;
mod volumes;

pub use declaration_error::DeclarationError;
pub use document::{EnvironmentMode, FilesystemMode, IsolationLevel, LayoutDirectory, SyscallMode};
pub use dry_run::{DryRun, DryRunResult};
pub use egress::{
    CA_VARIABLES, DEFAULT_EGRESS_PORTS, EGRESS_NETWORKS, EGRESS_PROXY, EGRESS_RESOLVER,
    EGRESS_TARGETS, EgressDecision, EgressLimits, EgressRules,
};
pub use escape::{EscapeOptions, EscapeResponse, Severity, UnknownResponse};
pub use explain::{ExplainedField, Source};
pub use fields::{
    CommandPolicy, ContainerPolicy, EnvironmentPolicy, FIELDS, Field, FilesystemPolicy,
    LayoutPolicy, LoggingPolicy, NetworkPolicy, Policy, ProcessPolicy, ResourcePolicy,
    SyscallPolicy,
};
pub use files::{FileAccess, FileDenied};
pub use flags::{
    FlagChoice, FlagGuard, FlagNumbers, FlagRef, FlagRule, FlagSubject, Flags, SETUP_BUCKETS,
    SessionFlags,
};
pub use format::{Format, ParseError, UnknownFormat, WriteError};
pub use host_sets::{HOST_SETS, HostSet};
pub use ids::{Ids, SANDBOX_IDS};
pub use layout::{Layout, LayoutMount};
pub use limits::{Ceilings, DiskLimits, Limit, LimitError, Limits, LimitsRequest};
pub use mounts::{Mount, WORKSPACE, overlays_dir, transactions_dir};
pub use network::{NetworkApproval, predicts_network};
pub use path_trie::PathTrie;
pub use plan::{
    Enforceable, HostInfo, IoLimits, LoggedCalls, Plan, PlanError, PlanTarget, Security,
    SyscallRules, egress_remedy, limits_remedy,
};
pub use profile::{Profile, Profiles, SessionProfile};
pub use run_spec::{RunSpec, RunTool};
pub use runtime::{PathKind, Runtime};
pub use scopes::{PolicyScope, Scopes, SessionScopes};
pub use secrets::home_dirs;
pub use size::TooLarge;
pub use tool::{ToolDeclaration, ToolDocument};
pub use validate::PolicyError;
pub use volumes::{VOLUME_BYTES, VOLUME_OWNER, VolumeMode, VolumeMount};
