//! Mode `logical` against real processes, terminals and control groups.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]

mod cleanup;
mod command;
mod harness;
mod limits;
mod process_tree;
mod refusal;
#[path = "../../../../tests/src/require.rs"]
mod require;
mod terminal;
