//! Logs, traces, metrics and tasks: one way for each.

#![forbid(unsafe_code)]

mod metrics;
mod page;
mod pipeline;
mod window;
pub mod task;

pub use metrics::{Metrics, Step, metrics};
pub use page::serve_metrics;
pub use pipeline::{Error, Format, Guard, Options, init};
