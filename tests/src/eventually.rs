//! Waiting for a condition or a future, with a timeout.

use std::{fmt::Debug, future::Future, time::Duration};

use tokio::time::{MissedTickBehavior, interval, timeout};

/// How long a test waits for something that should happen soon: longer than the 30 s between two
/// purges.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `probe` until it returns `Some`, and returns that value.
///
/// # Panics
/// After [`TIMEOUT`]. `what` names the condition in the message.
pub async fn eventually<T, F, P>(what: impl Debug, mut probe: P) -> T
where
    P: FnMut() -> F,
    F: Future<Output = Option<T>>,
{
    let poll = async {
        let mut tick = interval(Duration::from_millis(20));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            if let Some(found) = probe().await {
                return found;
            }
        }
    };
    within(what, poll).await
}

/// Waits for a future.
///
/// # Panics
/// After [`TIMEOUT`]. `what` names the future in the message.
pub async fn within<T>(what: impl Debug, future: impl Future<Output = T>) -> T {
    match timeout(TIMEOUT, future).await {
        Ok(done) => done,
        Err(_) => panic!("timed out after {TIMEOUT:?}: {what:?}"),
    }
}
