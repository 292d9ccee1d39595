//! System call filter, privileges and execution rights of a command. A small C program makes each
//! call. As a control, the same call without a filter gets another result.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]

mod allowed;
mod arguments;
#[path = "../conformance/exceptions.rs"]
#[allow(dead_code)]
mod exceptions;
mod fork_exec;
#[path = "../conformance/harness.rs"]
#[allow(dead_code)]
mod harness;
mod init_filter;
mod privileges;
#[path = "../../../../tests/src/require.rs"]
mod require;
mod syscall_probe;
mod syscalls;
