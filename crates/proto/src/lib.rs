//! The gRPC protocol: code generated from `proto/`, and conversions between messages and the types
//! of `codelia-types` and `codelia-policy`.
//!
//! [`v1`] is the public API, [`internal`] is what an api and its workers speak. A conversion from a
//! message either gives the complete Rust value or names the field at fault ([`InvalidField`]).
//! Nothing else lives here.

#![forbid(unsafe_code)]

/// The public API.
#[allow(missing_debug_implementations, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("codelia.v1");
}

/// The protocol between an api and a worker of one installation.
#[allow(missing_debug_implementations, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod internal {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("codelia.internal.v1");
    }
}

mod changes;
mod error;
mod policy;
mod run;
mod run_result;
mod run_spec;
mod sandbox;
mod time;

pub use error::InvalidField;
pub use time::{InvalidDuration, duration_from_proto, duration_to_proto, timestamp_to_proto};

/// The compiled descriptors of the public files, for server reflection.
pub const PUBLIC_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/public.bin"));
