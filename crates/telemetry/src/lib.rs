//! Logs, traces, metrics, tasks, threads for heavy work and retry delays: one way for each.

#![forbid(unsafe_code)]

pub mod backoff;
mod http;
mod metrics;
mod pipeline;
mod start;
pub mod task;
mod tenant_pool;
pub mod trace;

pub use http::{MetricsOptions, Probes, serve_metrics};
pub use metrics::{
    DiskCause, DiskEffect, DiskMetrics, EgressMetrics, EscapeMetrics, FlagMetrics, Metrics,
    RemovalMetrics, Step, metrics, observe_counter,
};
pub use pipeline::{Error, Format, Guard, LogOptions, OtlpOptions, init};
pub use tenant_pool::{Permit, TenantBusy, TenantPool};
