//! The worker as an api and the store see it: a real Postgres, the real internal channel, and a
//! backend that only starts processes, but where isolation is the point.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "all of this is test code")]

mod drain;
mod files;
mod fixture;
mod internal_tls;
mod isolated;
mod lease;
mod process_backend;
mod receipt;
mod run;
mod session;
