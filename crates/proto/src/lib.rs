//! The wire: code generated from `proto/`, and the conversions to and from the words of
//! `codelia-policy`. Nothing else lives here.

#![forbid(unsafe_code)]

/// The public API.
#[allow(missing_debug_implementations, clippy::all)]
pub mod v1 {
    tonic::include_proto!("codelia.v1");
}

/// What an api asks of a worker.
#[allow(missing_debug_implementations, clippy::all)]
pub mod internal {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("codelia.internal.v1");
    }
}

mod convert;
mod policy;

pub use convert::{InvalidDuration, duration_from_proto, duration_to_proto, timestamp_to_proto};

/// The compiled descriptors of the public files, for server reflection.
pub const PUBLIC_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/public.bin"));
