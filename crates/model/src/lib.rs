//! A model of the lease and run protocol for the stateright model checker.
//!
//! It has two workers, one database with calls in flight, apis that insert, push and sweep, and the
//! faults that they must survive. It follows `codelia-store` and `codelia-worker` step by step. Each
//! broken [`Variant`] leaves out one safeguard, and the checker shows what goes wrong without it.

#![forbid(unsafe_code)]

mod action;
mod apply;
mod database;
mod enabled;
mod protocol;
mod recovery;
mod state;
mod statement;
mod worker;

pub use action::{Action, Step};
pub use protocol::{Bounds, Protocol, Variant};
pub use state::{FaultBudget, State};
