//! The gRPC protocol: code generated from `proto/`, and conversions between messages and the types
//! of `codelia-types` and `codelia-policy`.
//!
//! [`v1`] is the public API, [`internal`] is what an api and its workers speak. A conversion from a
//! message either gives the complete Rust value or names the field at fault ([`InvalidField`]).
//! [`json`] writes messages of the public API as JSON. Nothing else lives here.

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
mod enums;
mod error;
mod held_session;
pub mod json;
mod limits;
mod policy;
mod run;
mod time;
mod wire;

pub use error::InvalidField;
pub use held_session::HeldSession;
pub use time::{InvalidDuration, duration_from_proto, duration_to_proto, timestamp_to_proto};

/// The domain of `google.rpc.ErrorInfo`. It names this service, not a host: it is the same on every
/// installation.
pub const ERROR_DOMAIN: &str = "codelia.dev";

/// The compiled descriptors of the public files, for server reflection and for [`json`].
pub const PUBLIC_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/public.bin"));
