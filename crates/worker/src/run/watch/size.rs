//! Measures directories about once a second while a command runs, to stop it when one is too large.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use codelia_telemetry::task;
use futures::future::{BoxFuture, FutureExt};
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::LimitWatch;

/// Between two measurements, at least.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same while a directory is full.
const FULL_INTERVAL: Duration = Duration::from_millis(100);
/// The share of one core that measuring may take: one part of this many.
const SHARE: u32 = 20;

/// The result of measuring once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sizes {
    Below,
    /// Something is as large as it may be, and is measured again soon.
    Full,
    Exceeded,
}

/// Watches sizes until it is dropped.
#[derive(Debug)]
pub(crate) struct SizeWatch {
    /// The resource whose limit it watches.
    resource: &'static str,
    /// Canceled when something is too large.
    exceeded: CancellationToken,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl SizeWatch {
    /// Calls `measure` again and again until it finds something too large. It may block, and should
    /// return soon when its argument becomes true.
    pub(crate) fn start<F>(name: &'static str, resource: &'static str, measure: F) -> Self
    where
        F: FnMut(&AtomicBool) -> Sizes + Send + 'static,
    {
        let exceeded = CancellationToken::new();
        let stop = Arc::<AtomicBool>::default();
        let task = task::background(name, watch(measure, stop.clone(), exceeded.clone()));
        Self { resource, exceeded, stop, task }
    }
}

impl LimitWatch for SizeWatch {
    fn exceeded(&self) -> BoxFuture<'_, &'static str> {
        self.exceeded.cancelled().map(|()| self.resource).boxed()
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.abort();
    }
}

async fn watch<F>(mut measure: F, stop: Arc<AtomicBool>, exceeded: CancellationToken)
where
    F: FnMut(&AtomicBool) -> Sizes + Send + 'static,
{
    loop {
        let began = Instant::now();
        let stop = stop.clone();
        let measured = spawn_blocking(move || {
            let sizes = measure(&stop);
            (measure, sizes)
        });
        let Ok((same, sizes)) = measured.await else { return };
        measure = same;
        let interval = match sizes {
            Sizes::Below => INTERVAL,
            Sizes::Full => FULL_INTERVAL,
            Sizes::Exceeded => return exceeded.cancel(),
        };
        sleep(interval.max(began.elapsed() * SHARE)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn watch_ends_when_something_is_too_large() {
        let mut left = vec![Sizes::Exceeded, Sizes::Full];
        let watch = SizeWatch::start("test", "bytes", move |_| left.pop().unwrap());
        assert_eq!(watch.exceeded().await, "bytes");
    }

    #[tokio::test]
    async fn dropped_watch_stops_its_measurement() {
        let (begun, has_begun) = mpsc::channel();
        let (ended, has_ended) = mpsc::channel();
        let watch = SizeWatch::start("test", "bytes", move |stop| {
            begun.send(()).unwrap();
            while !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            ended.send(()).unwrap();
            Sizes::Below
        });
        let wait = |event: mpsc::Receiver<()>| spawn_blocking(move || event.recv());
        wait(has_begun).await.unwrap().unwrap();
        drop(watch);
        wait(has_ended).await.unwrap().unwrap();
    }
}
