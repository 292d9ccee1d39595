//! When and how the service stops: it drains, or fences itself if nothing renews its lease.

use codelia_telemetry::task::{self, CriticalTaskEnded, CriticalTasks};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{error::Error, loops::LEASE_KEEPER};

/// Waits for a shutdown request, or for the failure that stops the service.
pub(crate) async fn requested_or_failed(
    shutdown: &CancellationToken,
    tasks: &mut CriticalTasks,
    server: impl Future<Output = Error>,
) -> Result<(), Error> {
    tokio::select! {
        () = shutdown.cancelled() => Ok(()),
        ended = tasks.failed() => Err(ended.into()),
        error = server => Err(error),
    }
}

/// Drains the worker and returns why it stopped. Without a lease keeper nothing may start or
/// commit, so the worker is fenced instead of drained if the keeper is dead or dies meanwhile, and
/// also if draining panics.
pub(crate) async fn drain_or_fence<D>(
    stopped: Result<(), Error>,
    tasks: &mut CriticalTasks,
    drain: D,
    fence: impl Future<Output = ()>,
) -> Result<(), Error>
where
    D: Future<Output = ()> + Send + 'static,
{
    if matches!(&stopped, Err(Error::CriticalTask(ended)) if is_lease_keeper(ended)) {
        fence.await;
        return stopped;
    }
    let mut result = stopped;
    let mut draining = AbortOnDropHandle::new(task::background("drain", drain));
    loop {
        tokio::select! {
            ended = &mut draining => {
                if ended.is_err() {
                    fence.await;
                    result = result.and(Err(Error::Stopped("drain")));
                }
                return result;
            }
            ended = tasks.failed() => {
                let must_fence = is_lease_keeper(&ended);
                result = result.and(Err(ended.into()));
                if must_fence {
                    draining.abort();
                    fence.await;
                    return result;
                }
            }
        }
    }
}

fn is_lease_keeper(ended: &CriticalTaskEnded) -> bool {
    ended.name == LEASE_KEEPER
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use super::*;

    /// Whether the worker was drained and fenced.
    #[derive(Debug, Default, Clone)]
    struct Calls {
        drained: Arc<AtomicBool>,
        fenced: Arc<AtomicBool>,
    }

    impl Calls {
        fn seen(&self) -> (bool, bool) {
            (self.drained.load(Ordering::SeqCst), self.fenced.load(Ordering::SeqCst))
        }
    }

    async fn set(flag: Arc<AtomicBool>) {
        flag.store(true, Ordering::SeqCst);
    }

    /// Stops a service as [`crate::Service::run`] does.
    async fn stop(
        tasks: &mut CriticalTasks,
        shutdown: &CancellationToken,
        calls: &Calls,
    ) -> Result<(), Error> {
        let stopped = requested_or_failed(shutdown, tasks, pending()).await;
        drain_or_fence(stopped, tasks, set(calls.drained.clone()), set(calls.fenced.clone())).await
    }

    fn name(result: Result<(), Error>) -> &'static str {
        match result {
            Err(Error::CriticalTask(ended)) => ended.name,
            other => panic!("not a critical task's end: {other:?}"),
        }
    }

    #[tokio::test]
    async fn requested_shutdown_drains_without_error() {
        let (mut tasks, shutdown, calls) =
            (CriticalTasks::default(), CancellationToken::new(), Calls::default());
        shutdown.cancel();
        stop(&mut tasks, &shutdown, &calls).await.unwrap();
        assert_eq!(calls.seen(), (true, false));
    }

    #[tokio::test]
    async fn panic_of_critical_task_drains_and_is_returned() {
        let (mut tasks, calls) = (CriticalTasks::default(), Calls::default());
        tasks.critical("poll", async { panic!("broken") });
        let result = stop(&mut tasks, &CancellationToken::new(), &calls).await;
        assert_eq!(name(result), "poll");
        assert_eq!(calls.seen(), (true, false));
    }

    #[tokio::test]
    async fn dead_lease_keeper_fences_instead_of_draining() {
        let (mut tasks, calls) = (CriticalTasks::default(), Calls::default());
        tasks.critical(LEASE_KEEPER, async { panic!("broken") });
        let result = stop(&mut tasks, &CancellationToken::new(), &calls).await;
        assert_eq!(name(result), LEASE_KEEPER);
        assert_eq!(calls.seen(), (false, true));
    }

    #[tokio::test]
    async fn lease_keeper_that_dies_while_draining_fences() {
        let (mut tasks, calls) = (CriticalTasks::default(), Calls::default());
        tasks.critical(LEASE_KEEPER, async {});
        let result = drain_or_fence(Ok(()), &mut tasks, pending(), set(calls.fenced.clone())).await;
        assert_eq!(name(result), LEASE_KEEPER);
        assert_eq!(calls.seen(), (false, true));
    }

    #[tokio::test]
    async fn panic_while_draining_fences() {
        let (mut tasks, calls) = (CriticalTasks::default(), Calls::default());
        let drain = async { panic!("broken") };
        let result = drain_or_fence(Ok(()), &mut tasks, drain, set(calls.fenced.clone())).await;
        assert!(matches!(result, Err(Error::Stopped("drain"))), "{result:?}");
        assert_eq!(calls.seen(), (false, true));
    }
}
