//! The worker as seen by an api and the store: a real Postgres and the real internal API. The
//! backend only starts processes, except in `blocked` and `isolated`.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "all of this is test code")]

mod blocked;
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
