//! The public gRPC server: authenticates, admits, records, dispatches, streams back.
//!
//! Stateless: whatever it knows is in Postgres or can be asked of a worker again, so any number of
//! them may serve the same installation. It never executes anything itself.

#![forbid(unsafe_code)]

mod admin;
mod admission;
mod audit;
mod auth;
mod context;
mod dispatch;
mod exec;
mod files;
mod maintenance;
mod options;
mod paging;
mod policies;
mod quota;
mod request;
mod resource_name;
mod runs;
mod service;
mod session_cache;
mod sessions;
mod status;
mod to_proto;
mod validate;
mod watch;

pub use auth::{generate_secret, hash_secret};
pub use options::{InternalTls, Options, ServerTls};
pub use service::{Error, Service};
