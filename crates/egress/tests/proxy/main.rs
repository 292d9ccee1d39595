//! Tests of the whole proxy: programs, servers and DNS servers on one side and the other, in a
//! network namespace of each test.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "all of this is test code")]

mod agreement;
mod client;
mod credentials;
mod decisions;
mod dns_server;
mod limits;
mod namespace;
mod rebinding;
#[path = "../../../../tests/src/require.rs"]
mod require;
mod restart;
mod rig;
mod server;
mod targets;
mod upstream;
