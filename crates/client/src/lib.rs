//! The client of Codelia: arguments and commands that call the API, and the connection they use.
//! Knows nothing of the server's parts: no store, no backends, no worker.

#![forbid(unsafe_code)]
// `output` makes text safe for a terminal.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod args;
pub mod client;
mod commands;
pub mod complete;
mod contexts;
mod detach_keys;
mod each;
mod environment;
pub mod error_report;
mod exec_stream;
pub mod exit_status;
mod fields;
mod ids;
pub mod output;
#[cfg(test)]
mod platform_tests;
pub mod policy_file;
mod resolve;
mod run_record;
mod safe_text;
mod settings;
mod signal;
pub mod signals;
pub mod spelling;
pub mod spinner;
mod streams;
mod style;
mod system;
mod table;
mod terminal;
pub mod units;
mod words;

pub use self::{
    commands::execute,
    run_record::run_record,
    settings::{Flag, Options, Settings, home_directory},
};
