//! Mode `logical` against real processes, terminals and control groups.

// A test that cannot go on has failed.
#![allow(clippy::unwrap_used)]

mod cleanup;
mod command;
mod harness;
mod limits;
mod process_tree;
mod refusal;
mod terminal;
