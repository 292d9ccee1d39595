//! The resident worker: holds session leases, executes their runs through a backend, and commits
//! the results. Apis push runs to it, and it also polls the store. The store decides: the worker
//! never trusts its memory over it, and never acts without a live lease.

#![forbid(unsafe_code)]

mod core;
mod disk;
mod drain;
mod egress;
mod error;
mod fault;
mod file_work;
mod files;
mod health;
mod lease;
mod loops;
mod options;
mod registration;
mod rpc;
mod run;
mod sandbox;
mod service;
mod session;
mod shutdown;
mod slots;
mod upkeep;
mod worker;
mod workspace;

pub use disk::{DiskChoice, DiskError, DiskReport, Missing, check_disk, root_space};
pub use egress::TrustError;
pub use error::Error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub use files::fuzz_tar;
pub use health::Health;
pub use options::{Listen, Options, WorkerOptions};
pub use service::Service;
pub use workspace::{
    root::{RootError, untraversable_ancestor},
    uid_range::{UidError, UidOptions, UidRange, reserve_uids},
};
