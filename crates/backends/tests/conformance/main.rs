//! One suite for all isolating modes: hostile and ordinary little programs, each with what must become
//! of it. The suite proves itself: in mode `logical`, which isolates nothing, every attack succeeds.

// A test that cannot go on has failed.
#![allow(clippy::unwrap_used)]

mod attacks;
mod containers;
mod deviations;
mod endings;
mod exceptions;
mod groups;
mod harness;
mod limits;
mod machine;
mod overlays;
mod policies;
mod programs;
mod shares;
mod surroundings;
mod unprivileged;
