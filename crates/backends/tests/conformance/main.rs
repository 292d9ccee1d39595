//! Conformance suite for all isolating modes: small hostile and ordinary programs, each with its
//! expected result. As a control, every attack must succeed in mode `logical`, which does not
//! isolate.

#![allow(clippy::unwrap_used, reason = "all of this is test code")]

mod aliases;
mod attacks;
mod cgroups;
mod cleanup;
mod containers;
mod core_dumps;
mod cpu_io;
mod environment;
mod exceptions;
mod harness;
mod host_objects;
mod layouts;
mod leaks;
mod levels;
mod limits;
mod native;
mod near_limits;
mod network;
mod operations;
mod overlays;
mod policies;
mod pools;
mod programs;
mod quotas;
mod reads;
#[path = "../../../../tests/src/require.rs"]
mod require;
mod setup_check;
mod unprivileged;
mod view;
mod vm;
mod watched;
mod watchers;
