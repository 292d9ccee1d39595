//! The internal gRPC server that apis call.

pub(crate) mod server;
pub(crate) mod service;
