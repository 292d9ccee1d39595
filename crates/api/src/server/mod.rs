//! The server itself: its listener, and the layers around every call.

pub(crate) mod access_log;
pub(crate) mod body_limit;
pub(crate) mod calls_in_flight;
mod grpc_code;
pub(crate) mod methods;
pub(crate) mod rate_limit;
pub(crate) mod request;
pub(crate) mod service;
pub(crate) mod web;
