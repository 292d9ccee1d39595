//! Logs, traces, metrics and tasks: one way for each.

#![forbid(unsafe_code)]

mod metrics;
mod page;
mod pipeline;
pub mod task;
mod window;

pub use metrics::{Metrics, Step, metrics};
pub use page::serve_metrics;
pub use pipeline::{Error, Format, Guard, Options, init};
