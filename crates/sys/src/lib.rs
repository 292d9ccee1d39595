//! Linux, as far as Codelia needs it: processes, signals, descriptors, terminals, limits, privileges,
//! filters, control groups. The only crate with `unsafe`.
//!
//! Calls that are one system call answer with its [`Errno`]: the caller knows the step. Those that
//! are several answer with an [`Error`] that names step and path.

mod error;

pub mod capability;
pub mod cgroup;
pub mod fd;
pub mod fs_identity;
pub mod landlock;
pub mod memory;
pub mod overlay;
pub mod proc_self;
pub mod process;
pub mod process_id;
pub mod pty;
pub mod resolve_beneath;
pub mod rlimit;
pub mod seccomp;
pub mod signal;
pub mod spawn;

pub use error::Error;
pub use rustix::{io::Errno, process::Pid};
