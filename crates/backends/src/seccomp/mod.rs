//! The seccomp filter of a plan: the BPF program that `codelia-init` installs.
//!
//! Allowed calls pass. All others are sent to the supervisor, or fail with `EPERM` in runtimes
//! without notifications. Some are denied before, whatever the policy allows ([`denials`]). A call
//! of a foreign ABI (ia32, x32) kills the process.

mod denials;
mod filter;
mod init;
mod names;
mod observed;
mod program;
mod ranges;
mod rules;
#[cfg(test)]
mod table_tests;

pub(crate) use self::{
    filter::filter,
    init::init_filter,
    names::{name, number},
    observed::{CHANGES, Form, Name, ObservedCall},
    rules::{Rules, is_allowed},
};
