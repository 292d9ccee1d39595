//! One run: from the push or poll that brings it to its committed outcome.

pub(crate) mod active;
pub(crate) mod attach;
pub(crate) mod changes;
pub(crate) mod commit;
pub(crate) mod dispatch;
pub(crate) mod execute;
pub(crate) mod executor;
pub(crate) mod io;
pub(crate) mod live_usage;
pub(crate) mod poll;
pub(crate) mod reads;
pub(crate) mod registry;
pub(crate) mod retry;
pub(crate) mod signs;
pub(crate) mod supervise;
pub(crate) mod watch;
