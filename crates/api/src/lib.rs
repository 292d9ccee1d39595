//! The public gRPC server: authenticates callers, admits and records runs, dispatches them to
//! workers and streams their events.
//!
//! It is stateless: its state is in Postgres or can be read from a worker again, so any number of
//! servers can serve one installation. It never executes commands itself.

#![forbid(unsafe_code)]

mod access_log;
mod admin;
mod admission;
mod alerts;
mod approvals;
mod audit;
mod audit_events;
mod auth;
mod calls_in_flight;
mod cancel;
mod changes;
mod context;
mod descriptors;
mod dispatch;
mod files;
mod flags;
mod info;
mod key_guard;
mod key_secret;
mod key_uses;
mod known_keys;
mod live_usage;
mod maintenance;
mod message;
mod operator;
mod options;
mod paging;
mod policies;
mod quota;
mod rate_limit;
mod request;
mod resource_name;
mod retention;
mod rules;
mod run_stream;
mod runs;
mod scope_policies;
mod scope_rules;
mod service;
mod session_cache;
mod session_lookup;
mod sessions;
mod sign_ins;
mod status;
mod tenant_policies;
mod to_proto;
mod tools;
mod validate;
mod volumes;
mod web;

pub use alerts::Webhook;
pub use dispatch::Placement;
pub use key_secret::{generate_secret, hash_secret, is_secret};
pub use options::{CallLimits, Options, Timeouts};
pub use service::{Error, Service};
pub use web::{CorsOrigins, InvalidOrigin};
