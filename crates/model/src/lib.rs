//! A model of the lease and run protocol for the stateright model checker.
//!
//! The model has two workers, one database with calls in flight, apis that insert, cancel, close
//! and push, processes that do the upkeep, and the faults that they must survive. It follows
//! `codelia-store` and `codelia-worker` step by step. Each broken [`Variant`] leaves out one
//! safeguard, and the checker shows what goes wrong without it.
//!
#![doc = include_str!("statements.md")]
#![forbid(unsafe_code)]

mod action;
mod apply;
mod bounds;
mod database;
mod enabled;
mod local;
mod properties;
mod protocol;
mod recovery;
mod state;
mod statement;
mod variant;
mod worker;

pub use action::{Action, Step};
pub use bounds::{Bounds, Budget, RunBounds};
pub use protocol::{Protocol, Variant};
pub use state::State;
