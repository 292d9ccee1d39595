//! System call filter, privileges and execution rights of a command. A small C program makes each
//! call. As a control, the same call without a filter gets another result.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]

/// Generates one test per runtime. Podman and Docker start the same runc with the same filter, so
/// Docker stands for both.
macro_rules! in_every_runtime {
    ($($name:ident),+ $(,)?) => {
        $crate::harness::in_mode!(bwrap = Bwrap: $($name),+);
        $crate::harness::in_mode!(nsjail = Nsjail: $($name),+);
        $crate::harness::in_mode!(native = Native: $($name),+);
        $crate::harness::in_mode!(runc = Runc: $($name),+);
        $crate::harness::in_mode!(runsc = Runsc: $($name),+);
    };
}

mod allowed;
mod arguments;
#[path = "../conformance/exceptions.rs"]
#[allow(dead_code)]
mod exceptions;
mod fork_exec;
#[path = "../conformance/harness.rs"]
#[allow(dead_code, unused_imports, unused_macros)]
mod harness;
mod init_filter;
mod privileges;
#[path = "../../../../tests/src/require.rs"]
mod require;
mod syscall_probe;
mod syscalls;
