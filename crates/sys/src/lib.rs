//! The Linux calls that Codelia needs: processes, signals, descriptors, terminals, limits,
//! capabilities, seccomp, Landlock, mounts, quotas, networks and cgroups. The only crate with
//! `unsafe` code.
//!
//! A function that makes one system call returns its [`Errno`], since the caller knows the step.
//! One that makes several returns an [`Error`] with the step and the path.

mod call;
mod error;

pub mod allocation;
pub mod capability;
pub mod cgroup;
pub mod elf;
pub mod fd;
pub mod fs_identity;
pub mod interfaces;
pub mod landlock;
pub mod loop_device;
pub mod memory;
pub mod mount;
pub mod mount_alias;
pub mod network;
pub mod overlay;
pub mod proc_self;
pub mod process;
pub mod process_id;
pub mod pty;
pub mod quota;
pub mod resolve_beneath;
pub mod rlimit;
pub mod seccomp;
pub mod signal;
pub mod spawn;
pub mod task_files;
pub mod user_namespace;

#[cfg(test)]
#[path = "../../../tests/src/require.rs"]
mod require;

pub use error::Error;
pub use rustix::{io::Errno, process::Pid};
