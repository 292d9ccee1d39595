//! Signals that wake the loops of a worker.

use tokio::sync::Notify;

/// Wakes loops before their interval is over.
#[derive(Debug, Default)]
pub(crate) struct Wakeups {
    pub(crate) poll: Notify,
    pub(crate) janitor: Notify,
}
