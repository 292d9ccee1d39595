//! The one way to start a task: with a name and a policy.

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, resume_unwind},
};

use futures::FutureExt;
use tokio::task::JoinHandle;
use tracing::Instrument;

/// Starts a task whose end, or panic, ends nothing else. A panic is logged with the task's name,
/// and whoever waits for the task still sees it.
#[allow(clippy::disallowed_methods)]
pub fn background<F>(name: &'static str, future: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    // The future is dropped right after a panic, so nobody sees it in a broken state.
    let watched = AssertUnwindSafe(future).catch_unwind().map(move |ended| match ended {
        Ok(output) => output,
        Err(panic) => {
            tracing::error!(task = name, panic = said(&*panic), "a task panicked");
            resume_unwind(panic)
        }
    });
    tokio::spawn(watched.instrument(tracing::info_span!("task", task = name)))
}

fn said(panic: &(dyn Any + Send)) -> &str {
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
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_panic_is_logged_with_the_name_of_its_task_and_seen_by_who_waits() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).finish();
        let _default = tracing::subscriber::set_default(subscriber);
        let ended = background("janitor", async { panic!("no broom") }).await;
        assert!(ended.unwrap_err().is_panic());
        let log = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(log.contains("janitor") && log.contains("no broom"), "{log}");
    }
}
