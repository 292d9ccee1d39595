//! One run: from the push or poll that brings it to its committed outcome.

pub(crate) mod active;
pub(crate) mod attach;
pub(crate) mod commit;
mod directory_limits;
pub(crate) mod dispatch;
pub(crate) mod escape;
pub(crate) mod execute;
pub(crate) mod held;
pub(crate) mod live_usage;
pub(crate) mod near_limits;
mod operations;
pub(crate) mod output;
pub(crate) mod output_buffer;
pub(crate) mod output_pacing;
mod output_rate;
pub(crate) mod registry;
pub(crate) mod retry;
mod size_watch;
pub(crate) mod slots;
pub(crate) mod stdio;
pub(crate) mod streams;
pub(crate) mod supervise;
mod transaction;
pub(crate) mod violations;
mod volumes;
