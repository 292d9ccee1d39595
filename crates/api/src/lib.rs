//! The public gRPC server: authenticates callers, admits and records runs, dispatches them to
//! workers and streams their events.
//!
//! It is stateless: its state is in Postgres or can be read from a worker again, so any number of
//! servers can serve one installation. It never executes commands itself.

#![forbid(unsafe_code)]

mod admin;
mod admission;
mod approvals;
mod audit;
mod auth;
mod cache;
mod context;
mod error;
mod files;
mod flags;
mod info;
mod options;
mod policy;
mod rpc;
mod runs;
mod server;
mod sessions;
mod stream;
mod tools;
mod upkeep;
mod volumes;
mod wire;
mod workers;

pub use auth::key_secret::{generate_secret, hash_secret, is_secret};
pub use options::{ApiOptions, ApprovalOptions, LimitOptions, Options, RunLimits, Timeouts};
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use server::web::fuzz::web_request as fuzz_web_request;
pub use server::{
    methods::InvalidMethods,
    service::{Error, Service},
    web::{CorsOrigins, InvalidOrigin},
};
pub use upkeep::alerts::Webhook;
pub use workers::Placement;
