//! The lease and run protocol as a model that a checker walks through, state by state.
//!
//! Two workers, one database with its statements in flight, apis that record, push and sweep, and
//! the faults they must survive. It follows `codelia-store` and `codelia-worker` step by step; each
//! [`Variant`] leaves out one thing that they do, so that the checker can show why they do it.

#![forbid(unsafe_code)]

mod action;
mod database;
mod healing;
mod protocol;
mod state;
mod statement;
mod worker;

pub use action::{Action, Event};
pub use protocol::{Bounds, Protocol, Variant};
pub use state::{Budget, State};
