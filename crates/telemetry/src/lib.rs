//! Logs, traces, metrics, tasks and retry delays: one way for each.

#![forbid(unsafe_code)]

pub mod backoff;
mod http;
mod latency_window;
mod metrics;
mod pipeline;
pub mod task;

pub use http::{HttpLimits, serve_metrics};
pub use metrics::{Metrics, Step, metrics};
pub use pipeline::{Error, Format, Guard, Options, init};
