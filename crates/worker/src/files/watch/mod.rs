//! `WatchFiles`: changes below a directory, by inotify.
//!
//! The kernel queues events while the caller is slow and drops those that do not fit, so a watch
//! holds little memory; then it looks for directories again and reports an overflow. A pause after
//! each piece of work bounds the processor time that a command can cause.

mod batch;
mod limiter;
mod scan;
mod stream;
mod tree;
mod watcher;

pub(super) use self::{limiter::WatchLimiter, stream::into_stream, watcher::Watcher};
