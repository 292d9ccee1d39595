//! Linux, as far as Codelia needs it: processes, signals, descriptors, terminals, limits, privileges,
//! filters, control groups. The only crate with `unsafe`.
//!
//! Calls that are one system call answer with its [`Errno`]: the caller knows the step. Those that
//! are several answer with an [`Error`] that names step and path.

mod error;

pub mod beneath;
pub mod capability;
pub mod cgroup;
pub mod directory;
pub mod fd;
pub mod identity;
pub mod landlock;
pub mod memory;
pub mod overlay;
pub mod owner;
pub mod process;
pub mod pty;
pub mod rlimit;
pub mod seccomp;
pub mod signal;
pub mod spawn;
pub mod surroundings;

pub use error::Error;
pub use rustix::{io::Errno, process::Pid};
