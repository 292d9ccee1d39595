//! The one way to start a task: with a name and a policy.

use std::future::Future;

use tokio::task::JoinHandle;
use tracing::Instrument;

/// Starts a task whose end, or panic, ends nothing else. A panic is logged with the task's name.
#[allow(clippy::disallowed_methods)]
pub fn background<F>(name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(future.instrument(tracing::info_span!("task", name)))
}
