//! The words of Codelia as types: ids, modes, limits, plans, commands, outcomes.
//!
//! Pure: no I/O, no async, no clock. Everything else depends on this crate; it depends on none
//! of the others.

#![forbid(unsafe_code)]

mod command;
mod id;
mod limits;
mod mode;
mod outcome;
mod plan;

pub use command::{CommandSpec, RunSpec, TerminalSize};
pub use id::{Incarnation, InvalidId, KeyId, LeaseEpoch, RunId, SessionId, TenantId, WorkerId};
pub use limits::{Ceilings, LimitError, Limits, LimitsRequest};
pub use mode::{Mode, NetworkMode, UnknownWord};
pub use outcome::{Outcome, Receipt, Refusal, Usage, Violation};
pub use plan::{Enforceable, Ids, Mount, Plan, PlanError, Security, SyscallRules};
