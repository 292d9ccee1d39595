//! The egress proxy: the only way from a sandbox in network mode `proxy` to another host.
//!
//! The worker starts it as a process of its own and speaks to it with the messages of [`control`].

#![forbid(unsafe_code)]

pub mod control;
