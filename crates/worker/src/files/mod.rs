//! File calls on the sessions that this worker holds: the public service, as apis call it.
//!
//! Each call names the lease under which it was sent, in its metadata. File work runs outside the
//! async runtime, piece by piece, so that a slow caller holds no thread.

mod archive;
mod budget;
mod calls;
mod error;
mod limiter;
mod listing;
mod read;
mod reservation;
mod service;
mod upload;
mod watch;
mod workspace;

#[cfg(any(test, fuzzing))]
pub use self::archive::fuzz_tar;
pub(crate) use self::service::FileService;
