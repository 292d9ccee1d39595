//! Accepts connections under caps and timeouts, and serves gRPC on them.
//!
//! Every connection has a task that knows its open calls. A connection that sends no request in
//! time, or has no open call for long, is closed: first politely, then by failing its next read. A
//! call that is open and quiet keeps its connection.

#![forbid(unsafe_code)]

mod accept;
mod admission;
mod calls;
mod connection;
mod http_service;
mod limits;
mod source;
mod tls;
mod transport;

pub use self::{
    accept::{Listener, serve},
    calls::hold_until_end,
    http_service::HttpService,
    limits::{Limits, within_share},
    source::Source,
    tls::{InternalTls, TlsError, TlsFiles, TlsIdentity, TlsPem},
    transport::Transport,
};
