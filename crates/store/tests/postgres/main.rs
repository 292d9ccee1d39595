//! The store against a real Postgres: one test for each guard.

#![allow(clippy::unwrap_used, reason = "tests")]

mod approval;
mod audit;
mod backlog;
mod disk;
mod ending;
mod failover;
mod flag;
mod group;
mod harness;
mod held;
mod history;
mod lease;
mod local;
mod migrations;
mod objects;
mod output;
mod pools;
mod queue;
mod quota;
mod retention;
mod roles;
mod run;
mod run_ends;
mod scope_policy;
mod session;
mod settings;
mod tool;
mod upkeep;
