//! Logs, traces, metrics and tasks: one way for each.

#![forbid(unsafe_code)]

mod metrics;
pub mod task;

pub use metrics::{Metrics, Step, metrics};
