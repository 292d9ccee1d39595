//! One suite for all isolating modes: hostile and ordinary little programs, each with what must become
//! of it. The suite proves itself: in mode `logical`, which isolates nothing, every attack succeeds.

// A test that cannot go on has failed.
#![allow(clippy::unwrap_used)]

mod attacks;
mod cgroups;
mod cleanup;
mod containers;
mod cpu_io;
mod environment;
mod exceptions;
mod harness;
mod limits;
mod overlays;
mod policies;
mod programs;
mod setup_check;
mod unprivileged;
mod vm;
