//! What holds a command inside beside its mounts: the filter of system calls, privileges, rights to
//! execute. Each attempt is made by a little program; without a filter the same program gets another
//! answer.

// A test that cannot go on has failed.
#![allow(clippy::unwrap_used)]

mod allowed;
#[path = "../conformance/exceptions.rs"]
#[allow(dead_code)]
mod exceptions;
mod fork_exec;
#[path = "../conformance/harness.rs"]
#[allow(dead_code)]
mod harness;
mod privileges;
mod syscall_probe;
mod syscalls;
