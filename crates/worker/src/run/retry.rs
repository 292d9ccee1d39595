//! Retries a store call of a run for as long as the run's lease is live.

use std::{future::Future, time::Duration};

use codelia_store::Error;
use codelia_telemetry::backoff::Backoff;
use tokio::time::sleep;

use super::{active::ActiveRun, executor::NoResult};

const MIN_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(1);
/// How often a statement that the database rejects is tried.
const MAX_REJECTIONS: u32 = 5;

/// Retries until the store has done it or the run's lease is lost.
pub(crate) async fn retry_until_fenced<F, T>(
    operation: &'static str,
    run: &ActiveRun,
    attempt: impl Fn() -> F,
) -> Result<T, NoResult>
where
    F: Future<Output = Result<T, Error>>,
{
    let mut rejections = 0;
    let mut backoff = Backoff::new(MIN_DELAY, MAX_DELAY);
    loop {
        match run.fence.run_until_cancelled(attempt()).await {
            Some(Ok(done)) => return Ok(done),
            None | Some(Err(Error::Fenced)) => return Err(NoResult::LeaseLost),
            Some(Err(error)) if error.is_transient() => {
                tracing::warn!(%error, operation, "store unavailable, retrying");
            }
            Some(Err(error)) => {
                rejections += 1;
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    operation,
                    "store rejected the statement"
                );
                if rejections >= MAX_REJECTIONS {
                    return Err(NoResult::LeaseLost);
                }
            }
        }
        sleep(backoff.next_delay()).await;
    }
}
