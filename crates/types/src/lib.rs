//! The data types that every crate shares: ids, modes, commands, outcomes, usage, receipts, leases.
//!
//! Pure data. This crate depends on no other crate of the workspace and does no I/O.

#![forbid(unsafe_code)]

mod changes;
mod command;
mod disk;
mod id;
mod lease;
mod mode;
mod near_limit;
pub mod option;
mod outcome;
mod reason;
mod result;
mod units;
mod violation;
mod words;

pub use changes::{Change, ChangeKind, ChangedFile, Changes, ChangesState, TransactionMode};
pub use command::{CommandSpec, SecretEnv, TerminalSize};
pub use disk::{DiskMechanism, DiskUsage};
pub use id::{
    ApprovalId, FlagId, Incarnation, InvalidId, KeyId, LeaseEpoch, RunId, SessionId, TenantId,
    ToolId, VolumeId, VolumeName, WorkerId, is_label,
};
pub use lease::LeaseToken;
pub use mode::{Mode, NetworkMode};
pub use near_limit::{NearLimit, Resource};
pub use outcome::{LostReason, NetworkUsage, Outcome, Receipt, Refusal, Usage};
pub use reason::{GrpcCode, Reason};
pub use result::{CommittedRun, EndedRun, RunResult};
pub use units::{ByteSize, Cores, InvalidCores, InvalidSize, duration, optional_duration};
pub use violation::{CountedViolation, Violation, Violations};
pub use words::UnknownValue;
