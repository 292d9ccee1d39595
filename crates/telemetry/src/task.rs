//! The only way to start a task: with a name and a policy for its end.
//!
//! A [`background`] task may end. A task of [`CriticalTasks`] may not: its end stops the process.

use std::{
    any::Any,
    future::Future,
    io,
    panic::{AssertUnwindSafe, resume_unwind},
    thread,
};

use futures::FutureExt;
use tokio::{runtime::Builder, sync::mpsc, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::trace;

/// Starts a task that may end. If it panics, the panic is logged with the task's name and returned
/// to the caller that joins it.
#[allow(clippy::disallowed_methods)]
pub fn background<F>(name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    // A large future would be copied into each of the layers around it.
    if size_of::<F>() > MAX_COPIED {
        tokio::spawn(logged(name, Box::pin(future)))
    } else {
        tokio::spawn(logged(name, future))
    }
}

/// Bytes of a future that are copied rather than allocated.
const MAX_COPIED: usize = 512;

/// Logs a panic of the future with the task's name.
fn logged<F: Future>(name: &'static str, future: F) -> impl Future<Output = F::Output> {
    // The future is dropped right after a panic, so no code sees it in a broken state.
    let logged = AssertUnwindSafe(future).catch_unwind().map(move |result| match result {
        Ok(output) => output,
        Err(panic) => {
            tracing::error!(task = name, panic = panic_message(&*panic), "task panicked");
            resume_unwind(panic)
        }
    });
    trace::carried(logged).instrument(tracing::info_span!("task", task = name))
}

/// A critical task panicked or returned before it was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("critical task {name:?} stopped; restart the process")]
pub struct CriticalTaskEnded {
    /// The task's name.
    pub name: &'static str,
}

/// Tasks that must run until they are stopped. Dropping the value stops them.
///
/// A service starts its loops here and returns the error of [`CriticalTasks::failed`], so that its
/// supervisor restarts the process instead of leaving it running without one of its loops.
#[derive(Debug)]
pub struct CriticalTasks {
    stop: CancellationToken,
    ended: mpsc::UnboundedSender<CriticalTaskEnded>,
    failures: mpsc::UnboundedReceiver<CriticalTaskEnded>,
}

impl Default for CriticalTasks {
    fn default() -> Self {
        // One message for each task at most: a task ends once.
        let (ended, failures) = mpsc::unbounded_channel();
        Self { stop: CancellationToken::new(), ended, failures }
    }
}

impl CriticalTasks {
    /// Starts a task. It is dropped when these tasks stop.
    pub fn critical<F>(&self, name: &'static str, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // Reports when it is dropped, which a panic of the task does too.
        let report = EndReport { name, stop: self.stop.clone(), ended: self.ended.clone() };
        background(name, async move {
            report.stop.run_until_cancelled(future).await;
        });
    }

    /// Starts a task on a thread and a runtime of its own, so that no other task can delay it. The
    /// thread ends when these tasks stop.
    ///
    /// # Errors
    /// The thread or its runtime cannot be created.
    pub fn critical_thread<F>(
        &self,
        name: &'static str,
        start: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<()>
    where
        F: Future<Output = ()>,
    {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let report = EndReport { name, stop: self.stop.clone(), ended: self.ended.clone() };
        let run = move || {
            let task = async { report.stop.run_until_cancelled(start()).await };
            runtime.block_on(logged(name, task));
        };
        thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
    }

    /// Waits until a task panics or returns before it was stopped.
    pub async fn failed(&mut self) -> CriticalTaskEnded {
        match self.failures.recv().await {
            Some(ended) => ended,
            // `self` holds a sender, so the channel never closes.
            None => std::future::pending().await,
        }
    }

    /// A token that is cancelled when these tasks stop.
    #[must_use]
    pub fn stop_token(&self) -> CancellationToken {
        self.stop.child_token()
    }
}

impl Drop for CriticalTasks {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Reports the end of a task when it is dropped.
struct EndReport {
    name: &'static str,
    stop: CancellationToken,
    ended: mpsc::UnboundedSender<CriticalTaskEnded>,
}

impl Drop for EndReport {
    fn drop(&mut self) {
        if !self.stop.is_cancelled() {
            tracing::error!(task = self.name, "critical task stopped");
            // A closed channel means that the service has already stopped.
            let _ = self.ended.send(CriticalTaskEnded { name: self.name });
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        sync::{Arc, Mutex},
    };

    use super::*;

    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn panic_is_logged_and_returned() {
        let buffer = LogBuffer::default();
        let writer = buffer.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        let _default = tracing::subscriber::set_default(subscriber);
        let result = background("upkeep", async { panic!("disk gone") }).await;
        assert!(result.unwrap_err().is_panic());
        let log = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        assert!(log.contains("upkeep") && log.contains("disk gone"), "{log}");
    }

    #[tokio::test]
    async fn ended_critical_task_is_reported() {
        let mut tasks = CriticalTasks::default();
        tasks.critical("keeper", async { panic!("broken") });
        assert_eq!(tasks.failed().await, CriticalTaskEnded { name: "keeper" });
        tasks.critical("poll", async {});
        assert_eq!(tasks.failed().await, CriticalTaskEnded { name: "poll" });
    }

    #[tokio::test]
    async fn ended_critical_thread_is_reported() {
        let mut tasks = CriticalTasks::default();
        tasks.critical_thread("keeper", || async { panic!("broken") }).unwrap();
        assert_eq!(tasks.failed().await, CriticalTaskEnded { name: "keeper" });
        tasks.critical_thread("poll", || async {}).unwrap();
        assert_eq!(tasks.failed().await, CriticalTaskEnded { name: "poll" });
    }

    #[tokio::test]
    async fn stopped_critical_thread_is_not_reported() {
        let mut tasks = CriticalTasks::default();
        let (running, mut dropped) = mpsc::channel::<()>(1);
        let start = move || async move {
            let _running = running;
            std::future::pending::<()>().await;
        };
        tasks.critical_thread("keeper", start).unwrap();
        tasks.stop.cancel();
        assert!(dropped.recv().await.is_none(), "the thread drops its task");
        assert!(tasks.failures.try_recv().is_err());
    }

    #[tokio::test]
    async fn stopped_critical_task_is_not_reported() {
        let mut tasks = CriticalTasks::default();
        let (running, dropped) = mpsc::channel::<()>(1);
        tasks.critical("upkeep", async move {
            let _running = running;
            std::future::pending::<()>().await;
        });
        tasks.stop.cancel();
        let mut dropped = dropped;
        assert!(dropped.recv().await.is_none(), "the task is dropped");
        assert!(tasks.failures.try_recv().is_err());
    }
}
