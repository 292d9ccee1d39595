//! The table `approvals`: requests that a person decides about. Each gets exactly one decision. A
//! request that nobody decided about in time has expired by the clock of the database, whether or
//! not a sweep has recorded it.
//!
//! A statement that changes a run and its approval locks session, run and approval in this order.

mod decide;
mod expire;
mod list;
mod permitted;
mod record;
mod request;

pub(crate) use self::request::insert_for_run;
pub use self::{
    decide::{Decision, DecisionResult, NotDecided, Revocation, RunToWake},
    list::{ApprovalFilter, ApprovalStatus},
    permitted::{Permitted, Withdrawn},
    record::{
        Approval, ApprovalKind, ApprovalReach, ApprovalScope, ApprovalState, Grant,
        MAX_APPROVAL_TEXT, MAX_GRANTS, MAX_OF_RUN, MAX_PENDING_OF_RUN, MAX_PENDING_OF_TENANT,
        Reader,
    },
    request::{ApprovalRequest, NewApproval, ReadGrant},
};
