//! The truth, asked of a real Postgres: every guard is seen to hold.

#![allow(clippy::unwrap_used, reason = "tests")]

mod harness;
mod lease;
mod output;
mod quota;
mod run;
mod session;
