//! Mode `logical` against real processes, terminals and control groups.

// A test that cannot go on has failed.
#![allow(clippy::unwrap_used)]

mod command;
mod destruction;
mod harness;
mod limits;
mod refusal;
mod terminal;
mod tree;
