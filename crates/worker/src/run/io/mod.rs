//! The streams of a run: its input, its output, and how fast both go.

pub(crate) mod buffer;
pub(crate) mod output;
pub(crate) mod pacing;
pub(crate) mod rate;
pub(crate) mod stdio;
pub(crate) mod streams;
